"""Steps in flight on a device, and the host buffers that they use meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from app.backends.base import Mark
from app.engine.batch import Batch
from app.engine.device_course import Course
from app.engine.device_step import Column, Sizes, StepViews, arrays_of


@dataclass(slots=True)
class DeviceFlight:
    """A step that was launched on a device.

    `ids` is a host tensor, valid once `mark` has been reached. `logits` is set if the sampler runs on the host.
    """

    batch: Batch
    course: Course | None
    mark: Mark
    ids: Tensor
    logits: Tensor | None
    started: float
    landed: list[int] | None = None

    def land(self) -> list[int]:
        """Wait for the step and return its sampled ids.

        The ids are copied to a list, because a later step reuses the tensor.
        """
        if self.landed is None:
            self.mark.wait()
            self.landed = self.ids.tolist()
        return self.landed


@dataclass(slots=True)
class Side:
    """The host copy of a step's input block (`block`, int64) and of its sampled ids.

    The buffer is reused once the device has read the last inputs that were sent from it.
    """

    words: Tensor
    ids: Tensor
    mark: Mark | None = None  # marks the end of a transfer from this buffer that did not become an in-flight step
    flight: DeviceFlight | None = None
    # views of bucket sizes, kept because creating them costs more than filling them
    views: dict[Sizes, StepViews[Column]] = field(default_factory=dict)

    def free(self) -> None:
        """Wait until the device no longer uses this buffer.

        An in-flight step that was never waited for is completed here, and its ids are read.
        """
        if self.flight is not None:
            self.flight.land()
        if self.mark is not None:
            self.mark.wait()
        self.flight = self.mark = None

    def views_of(self, sizes: Sizes, stays: bool) -> StepViews[Column]:
        """Return the array views of the input block for these sizes.

        If `keep` is True, the views are kept for later steps of the same sizes.
        """
        views = self.views.get(sizes)
        if views is None:
            views = arrays_of(self.words, sizes)
            if stays:
                self.views[sizes] = views
        return views

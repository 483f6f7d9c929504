"""A step under way on a device, and what of it lies on the host meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from app.backends.base import Mark
from app.engine.batch import Batch
from app.engine.device_course import Course
from app.engine.device_step import Column, Sizes, StepViews, arrays_of


@dataclass(slots=True)
class DeviceFlight:
    """`ids` lies on the host, and is true once the mark is passed; `logits` are there where the sampler picks."""

    batch: Batch
    course: Course | None
    mark: Mark
    ids: Tensor
    logits: Tensor | None
    started: float
    landed: list[int] | None = None

    def land(self) -> list[int]:
        """Waits; the ids are kept, for others will lie where they lay."""
        if self.landed is None:
            self.mark.wait()
            self.landed = self.ids.tolist()
        return self.landed


@dataclass(slots=True)
class Side:
    """Words and ids on the host. They are written again once the device has done what it was last told from here."""

    words: Tensor
    ids: Tensor
    mark: Mark | None = None  # behind what was told from here, where no flight came of it
    flight: DeviceFlight | None = None
    views: dict[Sizes, StepViews[Column]] = field(default_factory=dict)  # of buckets: making them costs more than filling them

    def free(self) -> None:
        """A flight that nobody waited for lands here."""
        if self.flight is not None:
            self.flight.land()
        if self.mark is not None:
            self.mark.wait()
        self.flight = self.mark = None

    def views_of(self, sizes: Sizes, stays: bool) -> StepViews[Column]:
        views = self.views.get(sizes)
        if views is None:
            views = arrays_of(self.words, sizes)
            if stays:
                self.views[sizes] = views
        return views

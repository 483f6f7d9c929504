"""A start whose model must be fetched first: the port is open and the progress is shown while the worker fetches."""

from __future__ import annotations

from dataclasses import dataclass

from app.hardware.facts import Facts
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.server.model_source import missing_model
from app.server.prepare import Prepared, ReportStage, prepare
from app.settings import Settings
from app.weights.forms import RECIPES
from app.weights.hub.cache import HubName
from app.weights.hub.fetch import fetch_or_use_cached


@dataclass(frozen=True, slots=True)
class UnfetchedModel:
    """What is known of a start before its model is on this machine. `plan` is the one without a model."""

    settings: Settings
    facts: Facts
    plan: ServingPlan
    name: HubName

    @property
    def model_name(self) -> str:
        """Name of the model in requests and responses."""
        return next(iter(self.settings.served_model_name), self.name.repo_id)

    def fetch(self, report: ReportStage) -> Prepared:
        """Fetch the model and prepare the start as for any other.

        Raises:
            StartupError: It cannot be fetched, opened or planned.
        """
        fetch_or_use_cached(self.name, report)
        return prepare(self.settings)


def prepare_start(settings: Settings) -> Prepared | UnfetchedModel:
    """Prepare a start as far as the model's files are on this machine.

    Raises:
        StartupError: The settings, the model and the machine do not fit together.
    """
    name = missing_model(settings)
    if name is None:
        return prepare(settings)
    facts = probe()
    return UnfetchedModel(settings, facts, make_plan(facts, None, settings, None, RECIPES.keys()), name)

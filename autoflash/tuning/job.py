"""Jobs as JSON: what the parent asks of a worker, and what it gets back."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.store.record import Measurement, Trial, TrialStatus, TuningRecord
from autoflash.target import Target
from autoflash.tuning.resources import Resources

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One config of one kernel. ``came_from``: who proposed it."""

    kernel: Kernel
    config: Config
    came_from: str = field(default="", compare=False)

    def to_message(self) -> Message:
        return {"kernel": self.kernel.name, "config": dict(self.config)}

    @classmethod
    def of(cls, stored: Trial | TuningRecord, came_from: str = "") -> "Candidate":
        """What a stored trial or record is about."""
        return cls(kernel=KERNELS[stored.kernel], config=stored.config, came_from=came_from)

    @classmethod
    def from_message(cls, message: Message) -> "Candidate":
        kernel = KERNELS[message["kernel"]]
        return cls(kernel=kernel, config=Config(**message["config"]))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a candidate in a worker."""

    status: TrialStatus
    reason: str = ""
    resources: Resources | None = None
    measurement: Measurement | None = None

    def to_message(self) -> Message:
        return {
            "status": self.status.value,
            "reason": self.reason,
            "resources": self.resources and dataclasses.asdict(self.resources),
            "measurement": self.measurement and dataclasses.asdict(self.measurement),
        }

    @classmethod
    def from_message(cls, message: Message) -> "Outcome":
        resources, measurement = message["resources"], message["measurement"]
        return cls(
            status=TrialStatus(message["status"]),
            reason=message["reason"],
            resources=Resources(**resources) if resources else None,
            measurement=Measurement(**measurement) if measurement else None,
        )


def study_message(problem: Problem, target: Target) -> Message:
    """The fields that every job of a study carries."""
    return {"problem": problem.as_dict(), "target": dataclasses.asdict(target)}


def study_from_message(message: Message) -> tuple[Problem, Target]:
    """The inverse of study_message."""
    return Problem(**message["problem"]), Target(**message["target"])

"""The device that a command measures on, or whose recorded measurements it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kdabench.data import devices, results
from kdabench.data.paths import relative
from kdabench.measure import session
from kdabench.measure.session import REPLAY


@dataclass(frozen=True)
class Target:
    """A device to measure, or to run on as recorded.

    choice   "cuda:N" or "replay:<slug>", as `run_sweep` takes it
    name     as its driver says, such as NVIDIA H200
    slug     of its folder in results/
    """

    choice: str
    name: str
    slug: str
    sms: int

    @property
    def replay(self) -> bool:
        """Whether nothing is measured: samples are those recorded."""
        return self.choice.startswith(REPLAY)

    def headline(self, asked: str, folder: Path) -> str:
        """Say what a command measures on, or runs on; asked: the user's word for the device."""
        if not self.replay:
            return f"measuring on {self.name} ({self.choice}, {self.sms} SMs)"
        where = f"the recorded measurements of {self.name} ({relative(folder / self.slug)})"
        return f"no GPU found: replaying {where}" if asked == "auto" else f"replaying {where}"


def find(choice: str, folder: Path) -> Target:
    """Find the device that a user's choice means; folder: results by device.

    Raises ValueError with a one-line reason if there is none.
    """
    found = session.find_device(choice, folder)
    if found.startswith(REPLAY):
        slug = found.removeprefix(REPLAY)
        name, sms = results.describe(folder / slug)
        return Target(found, name, slug, sms)
    import torch  # heavy, and of no use on recorded samples

    properties = torch.cuda.get_device_properties(int(found.removeprefix("cuda:")))
    return Target(
        found, properties.name, devices.slug(properties.name), properties.multi_processor_count
    )


def any_sms(folder: Path) -> int | None:
    """Count the SMs of the device that "auto" means; None if there is no device."""
    try:
        session.find_device("auto", folder)
    except ValueError:
        return None
    return find("auto", folder).sms

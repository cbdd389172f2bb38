"""The published figures, as files beside this module; `ATTRIBUTION.md` there says where they come from."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from coterie.errors import InputError
from coterie.files import read_text

FOLDER = Path(__file__).parent
"""Where the published files are."""

Use = Literal["fit", "compare"]
"""What a row may serve for."""

_MOST_BYTES = 1 << 20

_T = TypeVar("_T")


class Tpot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the artifact, on 8 prefill and 16 decode workers.

    Attributes:
        use: what it may serve for.
        workload: `task` or `language`.
        model: a key of `Published.models`.
        rate: requests each second.
        policy: a decode policy of this project, or `eldr`: locality with centroids refitted online.
        tpot_p50_ms: median time per output token.
        tpot_p95_ms: its 95th percentile.
        tpot_p99_ms: its 99th percentile.
        ttft_p50_ms: median time to first token.
    """

    use: Use
    workload: str
    model: str
    rate: float
    policy: str
    tpot_p50_ms: float
    tpot_p95_ms: float
    tpot_p99_ms: float
    ttft_p50_ms: float


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published figure, or the range of several.

    Attributes:
        figure: what it belongs to: a name that `coterie reproduce` knows.
        use: what it may serve for.
        workload: `task` or `language`; empty if of both.
        model: a key of `Published.models`; empty if of several.
        rate: requests each second; None if over several.
        setting: what was set: a policy, a topology, a width of the band.
        against: what a change is measured against: a policy, or `balancers`, the best of the load balancers at each
            rate; empty if the figure is no change.
        metric: what was measured; changes are in per cent.
        value: the figure; None where only a range is known.
        low: lower end of the range.
        high: upper end.
        source: where it stands.
    """

    figure: str
    use: Use
    workload: str
    model: str
    rate: float | None
    setting: str
    against: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    source: str

    @property
    def middle(self) -> float:
        """The figure, or the middle of its range."""
        if self.value is not None:
            return self.value
        assert self.low is not None, self
        assert self.high is not None, self
        return (self.low + self.high) / 2


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The routed part of a model.

    Attributes:
        name: as its makers call it.
        layers: MoE layers.
        experts: of each layer.
        top_k: experts of each token.
        expert_bytes: of one expert's weights.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    expert_bytes: int


class Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompt lengths in tokens: log-normal with this median and deviation of the logarithm, cut off at both ends."""

    median: float
    sigma: float
    least: int
    most: int


class Domain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A domain of a workload.

    Attributes:
        share: of all requests, in any unit.
        topics: share of each topic that is the domain's own; empty if it has the workload's common topics.
    """

    share: float
    topics: dict[str, float] = {}


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the requests of a workload are about.

    Attributes:
        output_tokens: of every request.
        measured: domains whose batches were measured.
        prompts: lengths.
        domains: by name.
        common_topics: number of topics that all domains without their own share.
    """

    output_tokens: int
    measured: list[str]
    prompts: Prompts
    domains: dict[str, Domain]
    common_topics: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """Everything that was published.

    Attributes:
        tpot: the artifact's runs.
        figures: all other figures.
        models: by key.
        workloads: by name.
    """

    tpot: tuple[Tpot, ...]
    figures: tuple[Figure, ...]
    models: Mapping[str, Model]
    workloads: Mapping[str, Workload]

    def to_fit(self) -> Published:
        """Only what constants may be fitted to."""
        return replace(
            self,
            tpot=tuple(row for row in self.tpot if row.use == "fit"),
            figures=tuple(row for row in self.figures if row.use == "fit"),
        )

    @property
    def measured(self) -> list[str]:
        """Keys of the models that the artifact's runs are of."""
        return list(dict.fromkeys(row.model for row in self.tpot))

    def figure(self, name: str, metric: str, **attributes: object) -> Figure:
        """The one row of a figure and metric with these attributes.

        Raises:
            InputError: there is none, or several.
        """
        wanted = {"figure": name, "metric": metric, **attributes}
        found = [row for row in self.figures if all(getattr(row, key) == value for key, value in wanted.items())]
        if len(found) != 1:
            raise InputError(f"published: {len(found)} rows with {wanted}; there must be one")
        return found[0]


def load_published(folder: Path = FOLDER) -> Published:
    """Read the published figures.

    Raises:
        InputError: a file cannot be read or is not as described; the message names file and line.
    """
    return Published(
        tpot=_read_rows(folder / "artifact.csv", Tpot),
        figures=_read_rows(folder / "figures.csv", Figure),
        models=read_toml(folder / "models.toml", dict[str, Model]),
        workloads=read_toml(folder / "workloads.toml", dict[str, Workload]),
    )


def read_toml(path: Path, kind: type[_T]) -> _T:
    """A TOML file as a value of a type.

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    try:
        return msgspec.convert(tomllib.loads(read_text(path, _MOST_BYTES)), kind)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InputError(f"{path}: {error}") from None


def _read_rows(path: Path, kind: type[_T]) -> tuple[_T, ...]:
    rows = csv.DictReader(read_text(path, _MOST_BYTES).splitlines())
    return tuple(_read_row(path, number, row, kind) for number, row in enumerate(rows, start=2))


def _read_row(path: Path, number: int, row: Mapping[str, Any], kind: type[_T]) -> _T:
    """Cells are text; an empty one is None where a figure is meant."""
    texts = {"use", "workload", "model", "policy", "figure", "setting", "against", "metric", "source"}
    given = {name: value if name in texts else value or None for name, value in row.items()}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}, line {number}: {error}") from None

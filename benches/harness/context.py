"""What every family of cases is given: sizes, folders, programs."""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from harness.driven import Driven


@dataclass(frozen=True)
class Sizes:
    """How large the cases are, and how often they run.

    Attributes:
        layers, hidden, vocab: of the model of 9 tensors a layer, and an embedding.
        small: tensors of 64x16 float32.
        fqns, ranks: of the checkpoint of many chunks, one a rank.
        reshard: matrices of the checkpoint to be resharded.
        reshard_dim: rows and columns of each.
        rounds: of most cases; `slow_rounds` for contenders that take many seconds.
    """

    layers: int
    hidden: int
    vocab: int
    small: int
    fqns: int
    ranks: int
    reshard: int
    reshard_dim: int
    rounds: int
    slow_rounds: int


#: `full` is the table of the README: 2.28 GB, 20,000 tensors, 1,000,000 chunks, 2 GB.
SIZES = {
    "full": Sizes(16, 2048, 81_920, 20_000, 2_000, 512, 15, 8192, rounds=7, slow_rounds=3),
    "quick": Sizes(16, 2048, 81_920, 4_000, 500, 256, 15, 8192, rounds=3, slow_rounds=1),
    "tiny": Sizes(2, 64, 512, 60, 12, 8, 2, 256, rounds=2, slow_rounds=1),
}


@dataclass(frozen=True)
class Context:
    """Where a family of cases works, and how large.

    Attributes:
        folder: for data; what is in it is reused by the next family.
        size: a key of `SIZES`.
        limit: the program `rust/core/examples/limit`, built; None: without the limits.
        peers: folder of the virtual environments of other loaders; None: leave them out.
        rounds: in place of those of the size.
    """

    folder: Path
    size: str
    limit: Path | None = None
    peers: Path | None = None
    rounds: int | None = None

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.size]

    @property
    def pairs(self) -> dict[str, int]:
        """The rounds, as `measure` takes them."""
        if self.rounds is not None:
            return {"rounds": self.rounds, "slow_rounds": min(self.rounds, self.sizes.slow_rounds)}
        return {"rounds": self.sizes.rounds, "slow_rounds": self.sizes.slow_rounds}

    def limit_over(self, *files: Path) -> AbstractContextManager[Driven | None]:
        """The limit program, over some files."""
        return nullcontext() if self.limit is None else Driven([self.limit, *files])

    def to_json(self) -> str:
        return json.dumps(
            {k: os.fspath(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        for name in ("folder", "limit", "peers"):
            fields[name] = fields[name] and Path(fields[name])
        return cls(**fields)


def ask_limit(limit: Driven | None, *words: str | os.PathLike[str] | int) -> float:
    """Seconds, from the limit program, if there is one."""
    if limit is None:
        msg = "left out (--no-limit)"
        raise RuntimeError(msg)
    return limit.seconds(*words)

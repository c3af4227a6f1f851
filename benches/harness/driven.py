"""Other processes that measure: kept ones that answer line by line, and how they do it."""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BENCHES = Path(__file__).resolve().parent.parent

Answer = dict[str, Any]


class Driven:
    """A program that reads a line of words, separated by tabs, and answers with a line of JSON."""

    def __init__(self, command: Sequence[str | os.PathLike[str]], **environment: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            [os.fspath(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": str(BENCHES), **environment},
            text=True,
        )
        self.pid = self._process.pid

    def ask(self, *words: str | os.PathLike[str] | int) -> Answer:
        """Raises what the program raised, or the end of what it wrote to stderr when it died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\t".join(map(str, words)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            while line.startswith("[Gloo]"):  # of torch 2.8 it tells whom it found
                line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["no word of why"]
            msg = f"exit status {self._process.wait()}: {last[0]}"
            raise RuntimeError(msg)
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def seconds(self, *words: str | os.PathLike[str] | int) -> float:
        return float(self.ask(*words)["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def worker(
    name: str, *arguments: str | os.PathLike[str] | int, python: str = sys.executable
) -> Driven:
    """A script of `workers/`, in a fresh process."""
    return Driven([python, BENCHES / "workers" / f"{name}.py", *map(str, arguments)])


def serve(commands: Mapping[str, Callable[..., Answer | None]]) -> None:
    """The other end: answers the lines of stdin, one command a line, with its result and the seconds it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        word, *arguments = line.rstrip("\n").split("\t")
        start = time.perf_counter()
        try:
            result = commands[word](*arguments) or {}
            answer = {"seconds": time.perf_counter() - start, **result}
        except Exception as error:  # noqa: BLE001  # crosses to the process that asked
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

"""A server of objects with the files of some folders: `python store_worker.py LATENCY_S FOLDER...`. Prints where it is; ends with its standard input."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.object_server import object_server


def main(latency: str, *folders: str) -> None:
    with object_server() as server:
        for folder in folders:
            server.put_folder(Path(folder), Path(folder).name)
        server.latency = float(latency)
        print(server.endpoint, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A server of objects with the files of some folders: `store_worker.py LATENCY_S FOLDER...`; answers `endpoint`, `counts`: what was asked since the last time, and `forget PREFIX`."""

import sys
from pathlib import Path

from harness.driven import serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.object_server import object_server

with object_server() as server:
    server.trusts = True
    for folder in sys.argv[2:]:
        server.put_folder(Path(folder), Path(folder).name)
    server.latency = float(sys.argv[1])
    server.page = 1000

    def counts() -> dict[str, int]:
        asked, most = dict(server.counts()), server.most_at_once
        data = [r for r in server.requests if r.kind == "get" and r.key.endswith(".safetensors")]
        server.requests.clear()
        server.most_at_once = server.at_once
        return {**asked, "most at once": most, "all": sum(asked.values()), "data": len(data)}

    def forget(prefix: str) -> None:
        for key in server.keys(prefix):
            del server.objects[key]

    serve({"endpoint": lambda: {"endpoint": server.endpoint}, "counts": counts, "forget": forget})

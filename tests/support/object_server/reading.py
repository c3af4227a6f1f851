"""Objects that are read, and listed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import formatdate
from xml.sax.saxutils import escape

from .exchange import XML, Exchange


class Reading(Exchange):
    """GET, HEAD, and the listing of a prefix."""

    def on_get(self, key, query, _body):
        if not key or "list-type" in query:
            self.list(query)
            return
        stored = self.store.objects.get(key)
        if stored is None:
            self.refuse(404, "NoSuchKey")
            return
        wanted = self.headers.get("If-Match")
        if not self.store.ignores_conditions and wanted not in (None, "*", stored.tag):
            self.refuse(412, "PreconditionFailed")
            return
        whole = memoryview(stored.data)
        when = formatdate(stored.modified, usegmt=True)
        headers = {"ETag": stored.tag, "Accept-Ranges": "bytes", "Last-Modified": when}
        if not stored.tag:
            del headers["ETag"]
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if found is None:
            self.answer(200, whole, headers)
            return
        start = int(found[1])
        end = min(int(found[2]) + 1 if found[2] else len(whole), len(whole))
        if start >= len(whole):
            self.refuse(416, "InvalidRange")
            return
        self.answer(
            206,
            whole[start:end],
            {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(whole)}"},
        )

    on_head = on_get

    def list(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        after = query.get("continuation-token") or query.get("start-after") or ""
        with self.store.lock:
            objects = dict(self.store.objects)
        names = {_entry(key, prefix, delimiter) for key in objects if key.startswith(prefix)}
        rest = sorted(name for name in names if name > after)
        limit = min(self.store.page, int(query.get("max-keys") or self.store.page))
        page, more = rest[:limit], len(rest) > limit
        entries = "".join(_told(name, objects.get(name)) for name in page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        self.answer(200, text.encode(), XML)


def _entry(key: str, prefix: str, delimiter: str | None) -> str:
    """What a key is listed as: itself, or the folder that it is in."""
    rest = key[len(prefix) :]
    if delimiter and delimiter in rest:
        return prefix + rest.split(delimiter)[0] + delimiter
    return key


def _told(name: str, stored) -> str:
    if stored is None or name.endswith("/"):
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    when = datetime.fromtimestamp(stored.modified, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    return (
        f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
        f"<ETag>{escape(stored.tag)}</ETag><Size>{stored.size}</Size></Contents>"
    )

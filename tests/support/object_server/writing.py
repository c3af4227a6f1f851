"""Objects that are written, in one piece or in parts, and deleted."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

from .exchange import XML, Exchange
from .state import Upload


class Writing(Exchange):
    """PUT with conditions, copies, multipart uploads, DELETE of one or of many."""

    def on_put(self, key, query, body):
        if "uploadId" in query:
            self.put_part(query, body)
            return
        if "x-amz-copy-source" in self.headers:
            self.copy(key)
            return
        tag = self.store.tag_of(body)
        with self.store.lock:
            refusal = self.refusal(key)
            if refusal is None:
                self.store.put(key, body, tag)
        if refusal is None:
            self.answer(200, b"", {"ETag": tag})
        else:
            self.refuse(*refusal)

    def copy(self, key: str):
        bucket, _, source = unquote(self.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        wanted = (
            None
            if self.store.ignores_conditions
            else self.headers.get("x-amz-copy-source-if-match")
        )
        with self.store.lock:
            there = self.store.objects.get(source)
            if bucket != self.store.bucket or there is None:
                refusal = 404, "NoSuchKey"
            elif wanted not in (None, "*", there.tag):
                refusal = 412, "PreconditionFailed"
            else:
                # One that was stored in parts is in one piece then: its tag is another.
                refusal = None
                self.store.put(key, there.data)
                tag = self.store.objects[key].tag
        if refusal is not None:
            self.refuse(*refusal)
            return
        text = f"<CopyObjectResult><ETag>{escape(tag)}</ETag></CopyObjectResult>"
        self.answer(200, text.encode(), XML)

    def refusal(self, key: str) -> tuple[int, str] | None:
        """Status and code, where the conditions of this request do not hold; asked with the lock held."""
        none, match = self.headers.get("If-None-Match"), self.headers.get("If-Match")
        if self.store.ignores_new:
            none = None
        if (none is None and match is None) or self.store.ignores_conditions:
            return None
        if self.store.refuses_conditions:
            return 501, "NotImplemented"
        there = self.store.objects.get(key)
        if match is not None and there is None:
            return 404, "NoSuchKey"
        if (none is not None and there is not None) or (
            match is not None and (match not in ("*", there.tag) or match.startswith("W/"))
        ):
            return 412, "PreconditionFailed"
        return None

    def put_part(self, query, body):
        number, tag = int(query["partNumber"]), self.store.tag_of(body)
        with self.store.lock:
            upload = self.store.uploads.get(query["uploadId"])
            if upload is not None:
                upload.parts[number] = (body, tag)
        if upload is None:
            self.refuse(404, "NoSuchUpload")
        else:
            self.answer(200, b"", {"ETag": tag})

    def on_post(self, key, query, body):
        if "uploads" in query:
            with self.store.lock:
                number = f"upload-{self.store.rng.getrandbits(64):016x}"
                self.store.uploads[number] = Upload(key)
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            self.answer(200, text.encode(), XML)
        elif "uploadId" in query:
            self.complete(key, query["uploadId"], body.decode())
        elif "delete" in query:
            self.delete_many(body.decode())
        else:
            self.refuse(400, "InvalidRequest")

    def complete(self, key: str, number: str, body: str):
        listed = [
            (
                int(re.search("<PartNumber>(.*?)</PartNumber>", part)[1]),
                unescape(re.search("<ETag>(.*?)</ETag>", part)[1], {"&quot;": '"'}),
            )
            for part in re.findall("<Part>(.*?)</Part>", body, re.DOTALL)
        ]
        with self.store.lock:
            tag = self.store.completed.get(number) if self.store.remembers_uploads else None
            refusal = None if tag is not None else self.refusal_to_complete(key, number, listed)
            if tag is None and refusal is None:
                parts = self.store.uploads.pop(number).parts
                tags = b"".join(bytes.fromhex(parts[i][1].strip('"')) for i, _ in listed)
                tag = f'"{hashlib.md5(tags, usedforsecurity=False).hexdigest()}-{len(listed)}"'
                self.store.put_pieces(key, [parts[i][0] for i, _ in listed], tag)
                self.store.completed[number] = tag
        if refusal is not None:
            self.refuse(*refusal)
            return
        text = f"<CompleteMultipartUploadResult><ETag>{escape(tag)}</ETag></CompleteMultipartUploadResult>"
        self.answer(200, text.encode(), XML)

    def refusal_to_complete(
        self, key: str, number: str, listed: list[tuple[int, str]]
    ) -> tuple[int, str] | None:
        upload = self.store.uploads.get(number)
        if upload is None or upload.key != key:
            return 404, "NoSuchUpload"
        if not listed:
            return 400, "MalformedXML"
        if [i for i, _ in listed] != sorted({i for i, _ in listed}):
            return 400, "InvalidPartOrder"
        if any(
            i not in upload.parts or upload.parts[i][1].strip('"') != tag.strip('"')
            for i, tag in listed
        ):
            return 400, "InvalidPart"
        if any(len(upload.parts[i][0]) < self.store.least_part for i, _ in listed[:-1]):
            return 400, "EntityTooSmall"
        return self.refusal(key)

    def delete_many(self, body: str):
        told = []
        for name in re.findall("<Key>(.*?)</Key>", body):
            key = unescape(name)
            if key in self.store.undeletable:
                told.append(
                    f"<Error><Key>{name}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
                )
            else:
                self.store.objects.pop(key, None)
                told.append(f"<Deleted><Key>{name}</Key></Deleted>")
        self.answer(200, f"<DeleteResult>{''.join(told)}</DeleteResult>".encode(), XML)

    def on_delete(self, key, query, _body):
        if "uploadId" in query:
            with self.store.lock:
                upload = self.store.uploads.pop(query["uploadId"], None)
            if upload is None:
                self.refuse(404, "NoSuchUpload")
                return
        elif key in self.store.undeletable:
            self.refuse(403, "AccessDenied")
            return
        else:
            with self.store.lock:
                refusal = self.refusal(key)
                if refusal is None:
                    self.store.objects.pop(key, None)
            if refusal is not None:
                self.refuse(*refusal)
                return
        self.answer(204)

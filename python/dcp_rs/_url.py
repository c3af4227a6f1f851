"""Paths and URLs of checkpoints, and the options of stores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from dcp_rs import _core
from dcp_rs._arguments import equivalent, type_of
from dcp_rs.errors import UnsupportedError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
#: A URL that went through :class:`~pathlib.Path`, which removes a slash.
_MANGLED = re.compile(r"(s3|gs|az|https?):/(?=[^/])")
#: A user before the host of a URL. A secret may hold a slash. Digits after a colon are a port, and
#: colons before a bracket an IPv6 address.
_USER = re.compile(r"[^/]*(@|:(?!\d+/|[^/]*\]).*@)")
#: Schemes of stores that the engine reads.
_STORES = ("s3", "gs", "az", "http", "https")
#: Ends of the names of options that are no secrets.
_PLAIN = (
    "region",
    "bucket",
    "endpoint",
    "endpoint_url",
    "allow_http",
    "virtual_hosted_style_request",
    "skip_signature",
    "timeout",
    "max_retries",
    "ca_bundle",
    "account_name",
)

#: Ends of the names of options that are URLs. The stores' clients panic if one is none.
_ENDPOINTS = ("endpoint", "endpoint_url", "endpoint_url_s3")
_HTTP = re.compile(r"https?://", re.IGNORECASE)
_NOT_IN_URL = re.compile(r'[^!-~]|["<>\\^`{|}]')
#: Ends of the names of options that are sent in a header. The clients panic if one cannot be.
_SENT = ("access_key_id", "secret_access_key", "token", "region", "content_type")
_NOT_IN_HEADER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
#: Beginnings of the variables that the client of a store reads.
_VARIABLES = {"s3": "AWS_", "az": "AZURE_"}

#: Options that have another name in other libraries.
_OPTIONS = ("aws_access_key_id", "aws_secret_access_key", "aws_region", "skip_signature")


#: A path or a URL.
StrPath = str | os.PathLike[str]
#: The argument ``storage_options``: a mapping, or a store of ``obstore``.
StoreArguments = Mapping[str, Any] | Any | None


class Url(PosixPath):
    """Path on a store. It keeps the two slashes of a URL, and nothing of it is a file."""

    def __str__(self) -> str:
        return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*):/(?!/)", r"\1://", super().__str__())

    def __fspath__(self) -> str:
        return str(self)

    def exists(self, **_: Any) -> bool:
        """Return false: nothing is on the file system."""
        return False

    def is_dir(self, **_: Any) -> bool:
        """Return false: nothing is on the file system."""
        return False

    def is_file(self, **_: Any) -> bool:
        """Return false: nothing is on the file system."""
        return False


def location(path: str | bytes | os.PathLike[str]) -> Path:
    """Return a path of the file system, or a :class:`Url`. ``file://`` names the file system.

    A path object whose text is a URL, such as a ``CloudPath``, is that URL.

    Raises:
        UnsupportedError: a URL has an unknown scheme, credentials, or an empty part; or it went
            through :class:`~pathlib.Path` and lost a slash.
        TypeError: the path is bytes, or no path.
        ValueError: the path is empty.
    """
    if isinstance(path, Url):
        return path
    if not isinstance(path, str | bytes | os.PathLike):  # callers without a type checker
        raise TypeError(_explain_no_path(path))
    text: str | bytes = str(path)
    if not _SCHEME.match(str(path)):
        text = os.fspath(path)
    if isinstance(text, bytes):
        msg = (
            f"a path is a str or a pathlib.Path, and this one is bytes, {text!r}: "
            "pass os.fsdecode(path)"
        )
        raise TypeError(msg)
    if scheme := _SCHEME.match(text):
        return _parse_url(text, scheme)  # its __fspath__ may name a copy on this machine
    if mangled := _MANGLED.match(text):
        _check_credentials(mangled[1], text[mangled.end() :])
        url = text.replace(":/", "://", 1)
        msg = f"{text}: a URL has two slashes after the colon: {url}"
        if isinstance(path, Path):
            msg = f"{text}: pass a URL as text: pathlib.Path removes one of its two slashes"
        raise UnsupportedError(msg, path=text)
    if not text:
        raise ValueError("the path is empty: for the current folder, pass '.'")
    return path if isinstance(path, Path) else Path(text)


def absolute(path: Path) -> Path:
    """Return a location that stays the same if the current folder changes."""
    # Path.resolve would follow links.
    return path if isinstance(path, Url) else Path(os.path.abspath(path))  # noqa: PTH100


def _parse_url(text: str, scheme: re.Match[str]) -> Path:
    """Return the path or the URL after a scheme."""
    name = scheme[1].lower()
    hint = equivalent(name)
    if hint is not None:  # in some of these schemes, the container stands where others have a user
        shown = "" if _has_credentials(text[scheme.end() :]) else f"{text}: "
        raise UnsupportedError(f"{shown}{name}:// is not supported: {hint}")
    _check_credentials(name, text[scheme.end() :])
    host, _, rest = text[scheme.end() :].partition("/")
    if name == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            why = "a file:// URL has three slashes before the path, and no host"
            raise UnsupportedError(f"{text}: {why}", path=text)
        return Path(unquote(parts.path))
    if name not in _STORES:
        why = (
            f"{name}:// is not supported: use a path of the file system, file://, "
            "s3://, gs://, az://, http:// or https://"
        )
    elif not host:
        why = f"a {name}:// URL without a bucket or a host"
    elif "//" in f"/{rest}":
        why = "two slashes with nothing between them: such a name cannot be read"
    else:
        return Url(f"{name}://{host}/{rest}")
    raise UnsupportedError(f"{text}: {why}", path=text)


def _has_credentials(rest: str) -> bool:
    return _USER.match(rest) is not None or "?" in rest or "#" in rest


def _check_credentials(scheme: str, rest: str) -> None:
    """Raise if a URL has credentials. This message does not show it; the others do."""
    if _has_credentials(rest):
        msg = (
            f"a {scheme}:// URL with a user, a query or a fragment: "
            "pass credentials in storage_options= or the environment"
        )
        raise UnsupportedError(msg)


def _explain_no_path(value: Any) -> str:
    """Return the message for an argument that is no path."""
    own = getattr(value, "checkpoint_id", None) or getattr(value, "path", None)
    hint = f": pass {os.fspath(own)!r}, its own path" if isinstance(own, str | os.PathLike) else ""
    shown = "None" if value is None else type_of(value)
    return f"a path is a str or a pathlib.Path, not {shown}{hint}"


class StorageOptions(Mapping[str, str]):
    """Options of a store. Secrets are not shown, and not pickled.

    Another process takes them from its environment. An option of None is left out.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if hint := equivalent(name, _OPTIONS):
                raise UnsupportedError(f"storage_options has no {name!r}: {hint}")
        self._options = {
            str(key): str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in options.items()
            if value is not None
        }

    @classmethod
    def of(cls, options: StoreArguments) -> StorageOptions | None:
        """Convert the argument of a caller: a mapping, or a store of ``obstore``.

        Raises:
            TypeError: it is something else.
        """
        if options is None or isinstance(options, StorageOptions):
            return options
        if isinstance(options, Mapping):
            return cls(options)
        config = getattr(options, "config", None)
        if isinstance(config, Mapping):
            if getattr(options, "credential_provider", None) is not None:
                raise TypeError(
                    "storage_options: credential providers of obstore are not supported: "
                    "pass their credentials as options"
                )
            return cls({**(getattr(options, "client_options", None) or {}), **config})
        msg = (
            f"storage_options is a {type(options).__name__}: "
            "a mapping of names to values, or a store of obstore"
        )
        raise TypeError(msg)

    def __getitem__(self, key: str) -> str:
        return self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{key}={value!r}" if _is_plain(key, value) else f"{key}=***"
            for key, value in self._options.items()
        )
        return f"StorageOptions({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageOptions, (
            {key: value for key, value in self._options.items() if _is_plain(key, value)},
        )


def _is_plain(key: str, value: str) -> bool:
    return key.lower().endswith(_PLAIN) and "@" not in value  # an endpoint may name a user


_of_command_line: Mapping[str, StorageOptions] = {}


def use_storage_options(options: Mapping[str, StorageOptions]) -> None:
    """Set the options of the command line, for URLs that are opened without options.

    Args:
        options: options by URL; ``""`` for all other URLs.
    """
    global _of_command_line  # noqa: PLW0603
    _of_command_line = options


def _command_line_options(url: str) -> StorageOptions | None:
    own = [
        begin
        for begin in _of_command_line
        if begin and f"{url}/".startswith(f"{begin.rstrip('/')}/")
    ]
    return _of_command_line.get(max(own, key=len, default=""))


def options_for(path: Path, options: StorageOptions | None) -> dict[str, str] | None:
    """Return the options of a URL for the engine; None for a path of the file system.

    Raises:
        UnsupportedError: there are options for a path of the file system. Or an option of a store,
            or its variable in the environment, has a value that cannot be sent.
    """
    if isinstance(path, Url):
        own = dict((_command_line_options(str(path)) if options is None else options) or {})
        begin = _VARIABLES.get(str(path).partition(":")[0])
        variables = os.environ.items() if begin else ()
        _check_values(own)
        _check_values({key: value for key, value in variables if key.startswith(begin or "")})
        return own
    if options:
        msg = f"{path} is on the file system, which has no storage_options"
        raise UnsupportedError(msg, path=path)
    return None


def _check_values(options: Mapping[str, str]) -> None:
    for name, value in options.items():
        if name.lower().endswith(_ENDPOINTS) and value and (why := _why_no_endpoint(value)):
            shown = f"={value}" if _is_plain(name, value) else ""
            raise UnsupportedError(f"{name}{shown}: {why}")
        if name.lower().endswith(_SENT) and _NOT_IN_HEADER.search(value):
            msg = f"{name}: remove the line end, or other control character, from its value"
            raise UnsupportedError(msg)


def _why_no_endpoint(value: str) -> str | None:
    """Return what is wrong with an endpoint, or None. It may name a secret, which is not shown."""
    if not _HTTP.match(value):
        return "an endpoint begins with https:// or http://"
    try:
        is_url = bool(urlsplit(value).hostname) and (urlsplit(value).port or 0) >= 0
    except ValueError:  # the port is no number, for example
        is_url = False
    if is_url and not _NOT_IN_URL.search(value):
        return None
    return "an endpoint is a URL such as https://host:9000, without spaces and line ends"


def store_at(url: Path, options: StorageOptions | None) -> _core.Store:
    """Return the store of a URL, for one operation: it refuses objects that change meanwhile.

    Secrets get no variable, as tools show the variables of a traceback.
    """
    return _core.Store(url, options_for(url, options) or {})

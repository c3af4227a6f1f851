"""Pickles that are put together by hand."""

PROTO = b"\x80\x04"


class Reduce:
    """Calls the function when it is unpickled."""

    def __init__(self, function, args=(), *more):
        self.made = (function, args, *more)

    def __reduce__(self):
        return self.made


def short(text):
    """The opcode for a text."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


def global_of(module, attribute):
    """The opcodes for an attribute of a module."""
    return short(module) + short(attribute) + b"\x93"


#: `os.system`, by a place of the memo that had the name of an allowed module before.
SWAPPED = short("torch._utils") + b"\x940" + short("os") + b"r\x00\x00\x00\x000h\x00"
SWAPPED += short("system") + b"\x93"
#: `getattr("os", "system")`.
GETATTR = global_of("builtins", "getattr") + short("os") + short("system") + b"\x86R"

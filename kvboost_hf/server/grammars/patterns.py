"""`ascii_pattern`: a regular expression whose `\\d`, `\\w` and `\\s` stand for characters of ASCII alone.

Rust's `\\d` has the digits of all scripts, ECMA-262's those of ASCII, and Python's depend on a flag. What is written
by a pattern of ASCII matches the client's own pattern in all of them. What must not be there (`\\D`, `[^\\d]`)
therefore stays as wide as Rust has it.
"""

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\v\f\r "}


def ascii_pattern(pattern: str) -> str:
    """Rewrite the classes of a regular expression in the syntax of Rust.

    Example:
        >>> print(ascii_pattern(r"\\d{4}-[\\w.]+ [^\\d]"))
        [0-9]{4}-[[0-9A-Za-z_].]+ [^\\d]
    """
    written, at = "", 0
    negations: list[bool] = []  # of the brackets that are open, whether each of them is a `[^`
    while at < len(pattern):
        piece = pattern[at : at + (2 if pattern[at] == "\\" else 1)]
        at += len(piece)
        if piece == "[":
            # What begins a class is part of it, even if it looks like its end.
            negated = pattern.startswith("^", at)
            piece = "[^" if negated else "["
            at += negated
            if pattern.startswith(("]", ":"), at):
                piece += pattern[at]
                at += 1
            negations.append(negated)
        elif piece == "]" and negations:
            negations.pop()
        elif piece[0] == "\\":
            piece = _escape(piece, sum(negations) % 2 == 1)
        written += piece
    return written


def _escape(escape: str, negated: bool) -> str:
    """An escape in place of another one that stands for more characters than ASCII has."""
    letter = escape[1:]
    if letter.lower() not in _ASCII or letter.isupper() != negated:
        return escape
    return f"[{'^' * negated}{_ASCII[letter.lower()]}]"

"""What is said when a row breaks the schema."""


class BadRowError(ValueError):
    """A row breaks the schema; the message names file, row, column and what was found.

    Attributes:
        reason: the short name under which `on_bad_row=skip` counts such rows.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.reason)


class BadIdError(BadRowError, IndexError):
    """A direct id lies outside its table."""

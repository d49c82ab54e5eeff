"""What a check finds: a verdict, on what, and why."""

from dataclasses import dataclass

from rich.text import Text

OK, WARNING, FAILED = "OK", "WARNING", "FAILED"
STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    verdict: str
    """``OK``, ``WARNING`` or ``FAILED``."""
    subject: str
    """What was checked, in a few words."""
    why: str

    def text(self) -> Text:
        """One line for a console."""
        return Text.assemble((f"{self.verdict:8}", STYLES[self.verdict]), (f"{self.subject:18} ", "bold"), self.why)

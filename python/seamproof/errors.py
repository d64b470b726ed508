"""Errors and warnings of the package."""

from __future__ import annotations

from collections.abc import Iterable


class SeamproofError(Exception):
    """An error of the set-up, not of the kernel: a wrong declaration, a missing program, a broken exchange."""


class DeclarationError(SeamproofError, ValueError):
    """A declaration that cannot be, or that the function does not keep."""


class MaximumTooSmall(DeclarationError):
    """A largest length that a caller gives, and that a sequence exceeds."""

    def __init__(self, name: str, given: int, sequence: int, length: int):
        super().__init__(
            f"{name}={given} is too small: sequence {sequence} has {length} tokens; give the largest real length, or "
            "more"
        )

    @classmethod
    def check(cls, name: str, given: object, lengths: Iterable[int]) -> None:
        """Refuses a largest length that is given and that one of the real lengths exceeds."""
        for sequence, length in enumerate(lengths):
            if given is not None and length > int(given):
                raise cls(name, int(given), sequence, length)


class PaddingDenied(DeclarationError):
    """A caller's word that sequences have no padding between them, where their offsets say that they have."""

    def __init__(self, side: str, sequence: int, real: int, padded: int):
        super().__init__(
            f"pad_between_seqs is False, but sequence {sequence} begins or ends at row {padded} of {side} and not at "
            f"{real}, the sum of the lengths: leave pad_between_seqs out, say True, or give these rows as real ones"
        )


class NotHere(SeamproofError):
    """A subject whose library or device this machine lacks: it cannot be judged here, which says nothing about it."""

    def __init__(self, what: object):
        super().__init__(f"not here: {what}")


class ProtocolError(SeamproofError):
    """An exchange with the program that does not follow the protocol."""


class ProgramMissing(SeamproofError):
    """A `seamproof` program that is nowhere to be found."""


class CannotJudge(SeamproofError):
    """A check that says nothing about the kernel: its own test failed, or the program did."""


class WrongSetting(SeamproofError, ValueError):
    """A setting of a check that cannot be: a time, a seed, a profile, or a stored case that is not there."""


class DeviceLost(SeamproofError):
    """A GPU that an earlier kernel left in error: nothing can run on it in this process any more."""


class OtherSubject(SeamproofError):
    """A stored case of another subject than the one that a test checks."""


class DirectoryTaken(SeamproofError):
    """A directory for a recording that holds something already."""


class OtherRankFailed(SeamproofError):
    """An error of other ranks of the group, for which this one gives up too; it says which, and their errors."""


class NotReady(Exception):
    """Results that changed after the caller's stream had ended: a fault of the kernel."""

    def __init__(self, names: Iterable[str]):
        super().__init__(
            f"results changed after the caller's stream had ended ({', '.join(names)}): the kernel works on a stream "
            "that the caller does not wait for"
        )


class Refused(Exception):
    """A problem that the subject does not take; `row` is the row of its table that says so, as `"softcap"`.

    Only a subject that declares `refuses=True` is asked for such problems. A refusal of a problem inside the table is
    a finding.
    """

    def __init__(self, row: str):
        super().__init__(row)
        self.row = row


class TooLittleRun(UserWarning):
    """A check that found nothing, but ran too little to say that nothing is wrong."""


class OwnFault(SeamproofError):
    """A fault of this package or of its set-up, and not of the kernel."""

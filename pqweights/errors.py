"""The exceptions that pqweights raises on purpose. Any other exception that escapes is a bug.

Every message is one line: what is wrong, in which file or tensor, what was expected, what was found, and what to do.
"""


class PqweightsWarning(UserWarning):
    """Something that the user should know of a result, which was given all the same."""


# Messages quote names and values of files, which may be of any length.
MOST_CHARACTERS = 1400


class PqweightsError(Exception):
    """Base of all expected failures. The message is shown to the user as it is, but for the middle of a long one."""

    def __str__(self) -> str:
        message = super().__str__()
        half = MOST_CHARACTERS // 2
        return message if len(message) <= MOST_CHARACTERS else f"{message[:half]} ... {message[-half:]}"


class SourceError(PqweightsError):
    """A source checkpoint is damaged, inconsistent, or of a kind that is not supported."""


class SourceChangedError(SourceError):
    """The source is not the one that this run, or the interrupted run in the output folder, was reading."""


class SourceReadError(SourceError):
    """A file of the source gives fewer bytes than it has, although it did not change: its disk or server fails."""


class StrictError(SourceError):
    """A weight has a larger error than its codec promises, and the user asked to be strict."""


class MasterError(PqweightsError):
    """A folder that pqweights wrote is incomplete, or contradicts itself."""


class MemoryShortageError(PqweightsError):
    """There is not enough memory for a step, which says nothing of what it was to work on."""


class OutputError(PqweightsError):
    """The output folder is occupied, in use, or out of space."""


class HubError(PqweightsError):
    """The Hub does not have what was asked for, refuses access, or cannot be reached."""


class HubUnavailableError(HubError):
    """The Hub cannot be reached, is switched off or failing, or nobody is logged in: it did not judge the request."""


class StorageError(PqweightsError):
    """An object storage does not have what was asked for, refuses access, or cannot be reached."""


class ClusterError(PqweightsError):
    """A Ray cluster cannot be reached, or one of its nodes cannot do its part."""


class RecipeError(PqweightsError):
    """A recipe, or an option that overrides it, is not valid for this checkpoint."""


class ExportError(PqweightsError):
    """An export target cannot store this model, or not with the given options.

    reason: the message without the file that it is about, and without what to do
    """

    def __init__(self, reason: str, *, file: str = "", remedy: str = "") -> None:
        super().__init__(f"{file + ': ' if file else ''}{reason}{'; ' + remedy if remedy else ''}")
        self.reason = reason


class OptionError(PqweightsError):
    """An option, or a combination of options, is wrong for every input."""


class EvaluationError(PqweightsError):
    """Nothing can be measured with this text, these models or these options."""


class GenerationError(PqweightsError):
    """A model cannot generate from this prompt, or not in the memory there is."""


class DeviceError(PqweightsError):
    """The device that was asked for is absent, or torch cannot use it."""


class MissingDependencyError(PqweightsError):
    """A feature needs a package that is not installed. The message names the pip command that installs it."""

"""The exceptions that pqweights raises on purpose; everything else that escapes is a bug.

    PqweightsError
    |-- SourceError            the checkpoint given as input is broken or of a kind that cannot be read
    |   `-- SourceChangedError it differs from the one that an interrupted run began with
    |-- MasterError            a pqweights folder contradicts its own manifest or configuration
    |-- OutputError            the output folder or its disk cannot take the result
    |-- HubError               the Hub, or the way there, refuses or fails
    |-- RecipeError            a recipe, codec, width or pattern is wrong
    |-- ExportError            a target cannot store this model, or not with these options
    |-- OptionError            an option has a value that it does not take, whatever the input; the command exits with 2
    |-- EvaluationError        a text is too short, or models cannot be compared on it
    |-- DeviceError            the device that is to compute is not there
    `-- MissingDependencyError an optional package is needed and absent

Every message is one line: what is wrong, in which file or tensor, what was expected, what was found, what to do.
"""


class PqweightsError(Exception):
    """Base of all expected failures; its message is shown to the user as it stands."""


class SourceError(PqweightsError):
    """The source checkpoint is damaged, inconsistent, or of an unsupported kind."""


class SourceChangedError(SourceError):
    """The source is not the one that the interrupted run in the output folder was reading."""


class MasterError(PqweightsError):
    """A folder written by pqweights is incomplete or disagrees with itself."""


class OutputError(PqweightsError):
    """The output folder is occupied, in use, or out of space."""


class HubError(PqweightsError):
    """The Hub does not have what was asked for, does not let us, or cannot be reached."""


class RecipeError(PqweightsError):
    """A recipe (or an option that overrides it) is not valid for this checkpoint."""


class ExportError(PqweightsError):
    """A target has no form for this model, or none with the options that were given."""


class OptionError(PqweightsError):
    """An option, or a combination of options, is wrong for every input."""


class EvaluationError(PqweightsError):
    """Nothing can be measured on this text, with these models or these options."""


class DeviceError(PqweightsError):
    """The device that was asked for is unknown, absent, or not usable by the packages that are installed."""


class MissingDependencyError(PqweightsError):
    """A feature needs a package that is not installed; the message names the pip command."""

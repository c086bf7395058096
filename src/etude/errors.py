"""Every error that a caller of etude handles.

The tree::

    EtudeError
    ├── ConfigError            what a user wrote does not hold: exit code 2
    ├── TaskError              a task directory is broken or unsafe: exit code 2
    │   └── EndOfTasksError    every epoch was given out
    ├── PolicyError            a model directory is missing, unsupported or damaged: exit code 2
    ├── HostError              this machine cannot do it (port, disk, kernel): exit code 4
    │   └── SandboxError       a sandbox could not be made or died
    ├── HarnessError           the harness cannot start or ended without an answer: exit code 4
    ├── StoreError             an object is missing, damaged or not writable: exit code 4
    │   ├── IntegrityError     bytes are not what their digest says
    │   ├── ObjectMissingError no object has that key
    │   ├── ObjectSizeError    an object is larger than allowed, or ends too early
    │   ├── ObjectExistsError  a write-once object is there already
    │   └── VersionTakenError  a policy version of that number is published with other bytes
    ├── SamplerError           a sampler cannot serve the request
    │   ├── VersionUnavailableError   it does not hold the version asked for (HTTP 409)
    │   ├── ContextOverflowError      prompt and answer do not fit its window (HTTP 400)
    │   ├── SampleRequestError        the request makes no sense (HTTP 400)
    │   └── SamplerBusyError          its queue is full (HTTP 429)
    └── RunError               the run cannot go on: exit code 1
        ├── NoSignalError      all attempts at a task get the same reward
        ├── FencedError        another trainer took the run over: this one has to end
        └── TrainerLostError   the trainer is gone; another one can be brought to where it was

A message says what happened, where, and what to do next.
"""


class EtudeError(Exception):
    """Base of the tree; `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(EtudeError):
    """A configuration value is unknown, of a wrong type or does not fit another."""

    exit_code = 2


class TaskError(EtudeError):
    """A task directory does not hold what Harbor's schema asks for, or is unsafe."""

    exit_code = 2


class PolicyError(EtudeError):
    """A model directory is missing, damaged, or of an architecture that is not supported."""

    exit_code = 2


class HostError(EtudeError):
    """This machine lacks something: a free port, disk space, a kernel feature."""

    exit_code = 4


class SandboxError(HostError):
    """A sandbox could not be created, or died under the command."""


class HarnessError(EtudeError):
    """The harness could not be started, or ended without calling the model."""

    exit_code = 4


class StoreError(EtudeError):
    """An object is missing or could not be read or written."""

    exit_code = 4


class IntegrityError(StoreError):
    """The bytes of an object are not those that its name or manifest claims."""


class SamplerError(EtudeError):
    """A sampler could not serve a request."""


class VersionUnavailableError(SamplerError):
    """The sampler does not (yet, or any more) hold the policy version asked for."""


class ContextOverflowError(SamplerError):
    """The prompt leaves no room for an answer within the model's context."""


class SampleRequestError(SamplerError):
    """A request for tokens that no sampler can serve: asking again cannot help."""


class SamplerBusyError(SamplerError):
    """The sampler's queue is full: another one, or a later moment, can serve the request."""


class RunError(EtudeError):
    """The run cannot go on; the message names the component that ended it."""


class NoSignalError(RunError):
    """All attempts at a task get the same reward, and not the best one, so there is nothing to learn from."""


class FencedError(RunError):
    """Another trainer took the run over, so nothing that this one makes can be published: it has to end."""


class TrainerLostError(RunError):
    """The trainer does not answer any more; whether it did what it was asked is not known."""


class ObjectSizeError(StoreError):
    """An object is larger than is allowed here, or ends before what was asked for: asking again does not help."""


class ObjectExistsError(StoreError):
    """A write-once object is there already."""


class VersionTakenError(StoreError):
    """A version of that number is published with other bytes, or a newer one is: a new lineage can go on."""


class ObjectMissingError(StoreError):
    """No object has that key (yet)."""


class EndOfTasksError(TaskError):
    """Every task was given out as often as it should be."""

"""`python -m seamproof.worker FILE[:NAME]`: serves a class of FILE that is an `Attention` of the mock."""

import importlib.util
import os
import sys
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))

import mock  # noqa: E402


def load(place):
    file, _, name = place.partition(":")
    spec = importlib.util.spec_from_file_location("kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    subjects = {key: value for key, value in vars(module).items() if getattr(value, "is_subject", False)}
    if name and name not in subjects:
        raise LookupError(f"{file} has no subject {name}; it has {', '.join(subjects) or 'none'}")
    if not name and len(subjects) != 1:
        raise LookupError(f"{file} has {len(subjects)} subjects; name one of {', '.join(subjects)}")
    return subjects[name or next(iter(subjects))]


class Lazy(mock.Worker):
    """A worker that loads its file when it is asked to open the subject."""

    def open(self, sequence):
        try:
            self.attention = load(sys.argv[1])
        except LookupError as error:
            return self.pipe.say(mock.FAILED, sequence, {"Infrastructure": str(error)})
        except Exception:
            return self.pipe.say(mock.FAILED, sequence, {"Infrastructure": traceback.format_exc()})
        return super().open(sequence)


Lazy().live()

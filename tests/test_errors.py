"""The exit code is part of the command line's contract."""

import pytest

from runflat.errors import RunError, RunflatError, UserError


@pytest.mark.parametrize("error", [UserError, *UserError.__subclasses__()])
def test_user_errors_exit_with_2(error: type[UserError]) -> None:
    """Catches a user error that scripts would take for a failed job."""
    assert error.exit_code == 2


def test_run_error_is_no_user_error() -> None:
    """Catches a failed job that is reported as a mistake of the user."""
    assert RunError.exit_code == 1
    assert issubclass(RunError, RunflatError)
    assert not issubclass(RunError, UserError)

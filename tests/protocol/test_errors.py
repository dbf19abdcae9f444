"""The error tree is complete, and an error keeps its type across processes."""

from pathlib import Path

import pytest

from nearline.protocol import errors
from nearline.protocol.errors import ERRORS, ErrorInfo, ModelNotFound, NearlineError


def tree(cls: type[NearlineError]) -> list[type[NearlineError]]:
    return [cls, *(below for sub in cls.__subclasses__() for below in tree(sub))]


def test_every_error_has_one_row_with_a_code_of_its_own() -> None:
    assert set(tree(NearlineError)) == set(ERRORS)
    codes = [row.code for row in ERRORS.values()]
    assert len(codes) == len(set(codes))


def test_the_drawn_tree_names_every_error() -> None:
    drawing = errors.__doc__ or ""
    assert [cls.__name__ for cls in ERRORS if cls.__name__ not in drawing] == []


def test_bytes_missing_or_bad_while_serving_are_a_fault_of_ours_and_name_the_checkpoint() -> None:
    for code in ("checkpoint_corrupt", "model_not_found"):
        error = ErrorInfo(code, "chunk 3").while_serving("d00d").exception()
        assert (error.code, error.status, ERRORS[type(error)].is_retryable) == ("checkpoint_unreadable", 500, True)
        assert "d00d" in error.message
        assert "chunk 3" in error.message
    other = ErrorInfo("unsupported_checkpoint", "no")
    assert other.while_serving("d00d") == other


@pytest.mark.parametrize("cls", list(ERRORS), ids=lambda cls: cls.__name__)
def test_an_error_comes_back_as_itself(cls: type[NearlineError]) -> None:
    error = cls("what to do", param="model", retry_after_s=3.0)
    back = ErrorInfo.of(error).exception()
    assert type(back) is cls
    assert (back.message, back.param, back.retry_after_s) == ("what to do", "model", 3.0)


def test_a_foreign_exception_becomes_an_internal_error_that_says_what_it_was() -> None:
    info = ErrorInfo.of(ZeroDivisionError("division by zero"))
    assert info.code == "internal_error"
    assert "ZeroDivisionError: division by zero" in info.message


def test_an_unknown_code_from_a_newer_process_is_still_an_error() -> None:
    assert type(ErrorInfo("brand_new", "text").exception()) is NearlineError


def test_statuses_that_clients_retry_are_marked_so() -> None:
    """openai-python retries 408, 409, 429 and 5xx unless x-should-retry says otherwise; no row is 409."""
    assert ERRORS[ModelNotFound].status == 404
    for row in ERRORS.values():
        assert row.status not in (408, 409)
        assert not (row.is_retryable and row.status < 429)


def test_no_message_is_a_bare_traceback() -> None:
    source = Path(errors.__file__).read_text()
    assert "traceback" not in source

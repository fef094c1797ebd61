"""The replica's log has what every layer says, once."""

import logging
from collections.abc import Iterator

import pytest

from app.serve.package_logs import PACKAGES, ServeHandler, log_with_serve


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What reaches Serve's handlers."""
    kept: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = kept.append
    serve = logging.getLogger("ray.serve")
    level = serve.level
    serve.setLevel(logging.INFO)
    serve.addHandler(handler)
    yield kept
    serve.removeHandler(handler)
    serve.setLevel(level)
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, ServeHandler)]
        logger.setLevel(logging.NOTSET)


def test_what_a_layer_says_is_in_serves_log_once(records: list[logging.LogRecord]) -> None:
    log_with_serve()
    log_with_serve()
    try:
        raise RuntimeError("out of memory")
    except RuntimeError:
        logging.getLogger("app.async_engine").exception("The step loop failed")
    logging.getLogger("models.loader").info("loading")
    logging.getLogger("kernels.ops").debug("too small to be said")
    assert [record.getMessage() for record in records] == ["The step loop failed", "loading"]
    assert records[0].exc_info is not None

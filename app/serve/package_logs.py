"""What the layers below Serve say, in the log of the replica that they run in."""

import logging

PACKAGES = ("app", "models", "kernels")


def log_with_serve() -> None:
    """From here on the packages' loggers speak through Serve's, at its level. May be called again."""
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(_serve().level)
        if not any(isinstance(handler, ServeHandler) for handler in logger.handlers):
            logger.addHandler(ServeHandler())


class ServeHandler(logging.Handler):
    """Hands records to Serve's logger, which alone writes a replica's log, with the handlers it has at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        _serve().handle(record)


def _serve() -> logging.Logger:
    return logging.getLogger("ray.serve")

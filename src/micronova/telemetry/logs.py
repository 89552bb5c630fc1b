"""Logs: lines for people, or one JSON object a line; each with the request it belongs to."""

import contextvars
import logging
import sys
from datetime import UTC, datetime

import msgspec

from micronova.conf.settings import Settings

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class TextLines(logging.Formatter):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix("micronova.")
        request = request_id.get()
        text = f"{when} {record.levelname:<7} {name}: {record.getMessage()}"
        if request and request not in text:
            text += f" [{request}]"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JSONLines(logging.Formatter):
    """Lines for programs: one JSON object each."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get() or None,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logging(settings: Settings) -> None:
    """Send logs to standard error, as the settings say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if settings.default.log_format == "json" else TextLines())
    logging.basicConfig(level=settings.default.log_level, handlers=[handler], force=True)
    for noisy in ("uvicorn", "uvicorn.error", "aio_pika", "aiormq", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

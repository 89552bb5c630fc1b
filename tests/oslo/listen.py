"""A real oslo.messaging listener. Not for our environment: `tests.oslo.listener` runs it in one of its own.

Prints "ready" when it listens, then each notification as a line of JSON; ends when its input ends.
"""

import json
import sys
import threading
from typing import Any

import oslo_messaging
from oslo_config import cfg

PRINTING = threading.Lock()
TOPICS = ("notifications", "versioned_notifications")


class Endpoint:
    def __init__(self, priority: str) -> None:
        setattr(self, priority, self.receive)
        self.priority = priority

    def receive(self, context: Any, publisher_id: str, event_type: str, payload: Any, metadata: Any) -> None:
        line = {
            "priority": self.priority,
            "context": context,
            "publisher_id": publisher_id,
            "event_type": event_type,
            "payload": payload,
            "metadata": metadata,
        }
        with PRINTING:  # endpoints run in threads
            print(json.dumps(line), flush=True)


def main(url: str, exchange: str) -> None:
    conf = cfg.ConfigOpts()
    conf([])
    transport = oslo_messaging.get_notification_transport(conf, url)
    targets = [oslo_messaging.Target(topic=topic, exchange=exchange) for topic in TOPICS]
    endpoints = [Endpoint("info"), Endpoint("error")]
    listener = oslo_messaging.get_notification_listener(transport, targets, endpoints, executor="threading")
    listener.start()
    print("ready", flush=True)
    sys.stdin.read()
    listener.stop()
    listener.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])

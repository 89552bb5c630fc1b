"""A private RabbitMQ: own node name, ports, directory, cookie and epmd; never the system's."""

import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path

from micronova.cli.private_services.process import ServiceError, accepts, end, wait_until

HOST = "127.0.0.1"


def programs() -> Path:
    """Return where the server's own scripts are; Debian's wrappers in the PATH would change the user."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"))
    if not found:
        raise ServiceError("RabbitMQ is not installed: apt-get install --no-install-recommends rabbitmq-server")
    return found[-1]


class PrivateRabbitMQ:
    """One broker: `create` makes its files, `launch` starts it, `stop` ends the processes that `launch` started."""

    def __init__(self, directory: Path, port: int, epmd_port: int, distribution_port: int) -> None:
        self.directory = directory
        self.port = port
        self.node = f"mn{port}@localhost"
        self.process: subprocess.Popen[bytes] | None = None
        self.epmd: subprocess.Popen[bytes] | None = None
        self._epmd_port = epmd_port
        self._distribution_port = distribution_port
        self._bin = programs()

    def create(self, tls: tuple[Path, Path, Path] | None = None) -> None:
        """Make the files of a new broker, which has the user guest and the vhost /.

        `tls` is an authority, a certificate and its key; the broker then speaks AMQP over TLS only.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        cookie = self.directory / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        (self.directory / "enabled_plugins").write_text("[].")
        (self.directory / "rabbitmq.config").write_text(_settings(self.port, tls))

    def launch(self) -> None:
        """Start the broker, and its epmd if it does not run, and wait until it accepts connections."""
        log = self.directory / "log"
        environment = self.environment()
        with log.open("ab") as out:
            if not accepts(self._epmd_port):
                # The broker would start a daemon of its own that outlives it; a child of ours ends with us.
                self.epmd = subprocess.Popen(
                    [shutil.which("epmd") or "epmd", "-port", str(self._epmd_port), "-address", HOST],
                    env=environment,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
                wait_until(lambda: accepts(self._epmd_port), self.epmd, log)
            self.process = subprocess.Popen(
                [str(self._bin / "rabbitmq-server")],
                env=environment,
                cwd=self.directory,  # where Erlang would drop a crash dump
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        wait_until(lambda: accepts(self.port), self.process, log)

    def stop(self) -> None:
        """Stop in order, and with it the epmd."""
        end(self.process, signal.SIGTERM)
        self.process = None
        end(self.epmd, signal.SIGTERM)
        self.epmd = None

    def control_command(self) -> list[str]:
        """Return how rabbitmqctl is called for this broker, with `environment`."""
        return [str(self._bin / "rabbitmqctl"), "--quiet", "--node", self.node]

    def environment(self) -> dict[str, str]:
        """Return the environment of the broker and of its tools."""
        directory = str(self.directory)
        return {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "HOME": directory,  # the Erlang cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONF_ENV_FILE": f"{directory}/none",
            "RABBITMQ_CONFIG_FILE": f"{directory}/rabbitmq.config",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{directory}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/enabled_plugins",
            "RABBITMQ_MNESIA_BASE": f"{directory}/mnesia",
            "RABBITMQ_LOG_BASE": f"{directory}/logs",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": f"{directory}/pid",
            # One scheduler is plenty here; and nothing of the node is reachable but on loopback.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+S 1:1 +SDcpu 1:1 +SDio 2 +A 4 -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            # This pair makes the script become the Erlang machine, so that our child's pid is the broker's.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput +B i",
        }


def _settings(port: int, tls: tuple[Path, Path, Path] | None) -> str:
    # Erlang terms, not the newer key = value form: translating that costs the start half a second more.
    listeners = f'{{tcp_listeners, [{{"{HOST}", {port}}}]}}'
    if tls is not None:
        authority, certificate, key = tls
        listeners = (
            f'{{tcp_listeners, []}},\n    {{ssl_listeners, [{{"{HOST}", {port}}}]}},\n    '
            f'{{ssl_options, [{{cacertfile, "{authority}"}}, {{certfile, "{certificate}"}}, {{keyfile, "{key}"}}, '
            "{verify, verify_none}, {fail_if_no_peer_cert, false}]}"
        )
    return f"""[
  {{rabbit, [
    {listeners},
    {{vm_memory_high_watermark, {{absolute, "1GB"}}}},
    {{disk_free_limit, "50MB"}},
    {{log, [{{console, [{{enabled, true}}, {{level, warning}}]}}, {{file, [{{file, false}}]}}]}}
  ]}}
].
"""

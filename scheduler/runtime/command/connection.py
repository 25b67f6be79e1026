"""What the commands that ask a running scheduler share: the `--channel` flag, the connection, the answer."""

import json
import os
from typing import Any

from rose.arguments import CommandParser
from rose.config import Settings
from rose.errors import ChannelError, ConfigError
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import Answer, Call
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.channel.protocol import COMMAND

CONNECT_S = 5.0
ANSWER_S = 30.0


def channel_parser(name: str, description: str, example: str) -> CommandParser:
    """Returns the parser of ``rose sched NAME``, with `--channel`."""
    parser = CommandParser(f"rose sched {name}", description, example)
    add_channel_flag(parser)
    return parser


def add_channel_flag(
    parser: CommandParser, use: str = "where the scheduler listens: unix:FOLDER or redis://HOST:PORT/DB"
) -> None:
    parser.add_argument(
        "--channel",
        default=Settings.from_environment().channel_url,
        help=f"{use} (default: $ROSE_CHANNEL, else %(default)s)",
    )


def connect(channel: str) -> ControlClient:
    """Raises: ChannelError if no scheduler answers within `CONNECT_S`."""
    return ControlClient(ChannelUrl.parse(channel).join(f"{COMMAND}{os.uname().nodename}"), CONNECT_S)


def ask(client: ControlClient, call: Call) -> dict[str, Any]:
    """Returns the answer's body. Raises: ConfigError if the scheduler refuses, ChannelError without an
    answer."""
    answer = client.ask(call, ANSWER_S)
    if not isinstance(answer, Answer):
        raise ChannelError(f"the scheduler answered {answer}")
    if answer.error is not None:
        raise ConfigError(answer.error)
    return answer.body


def print_json(body: dict[str, Any]) -> None:
    print(json.dumps(body))

"""Settings of a process: one class per concern, whose field docs are the --help; default < file < environment < flag.

A service's class is composed of the classes of its concerns (libs/config/concerns.py and services/*/config.py). `parse` reads the YAML
file that --config names, the environment and the command line into it, and ends the process with a message that names the file and key,
the variable or the flag when something is unknown, of a wrong type or contradictory. A class that is constructed directly reads nothing.
"""

from libs.config.args import to_args, to_text
from libs.config.concerns import CommonConfig, ServiceConfig
from libs.config.settings import NONE_WORD, ConfigT, Settings
from libs.config.sources import parse

__all__ = ["NONE_WORD", "CommonConfig", "ConfigT", "ServiceConfig", "Settings", "parse", "to_args", "to_text"]

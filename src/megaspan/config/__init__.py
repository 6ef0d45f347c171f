"""What a user can ask for: the options, their checks and their documentation, free of torch."""

from megaspan.config.defaults import differing_defaults as differing_defaults
from megaspan.config.read import load_config as load_config
from megaspan.config.schema import SFTConfig as SFTConfig

__all__ = ["SFTConfig", "differing_defaults", "load_config"]

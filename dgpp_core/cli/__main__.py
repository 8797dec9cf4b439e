"""``python -m dgpp_core.cli`` is `dgpp`."""

from dgpp_core.cli.main import main

main()

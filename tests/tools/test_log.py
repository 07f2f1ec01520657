"""A library leaves logging to the application; where that has configured none, enabling shows what is said."""

import subprocess
import sys

SAY = "from paddle_vpp_ext import log; log.logger.info('hello'); log.logger.warning('careful')"


def said(*lines):
    """(stdout, stderr) of a process that runs these lines, then says an info and a warning."""
    done = subprocess.run([sys.executable, "-c", "; ".join([*lines, SAY])], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


def test_importing_changes_nothing_of_logging():
    out, err = said(
        "import logging",
        "import paddle_vpp_ext.log",
        "l = logging.getLogger('paddle_vpp_ext')",
        "print(l.propagate, l.level, len(l.handlers))",
    )
    assert out.split() == ["True", "0", "1"] and err == ""


def test_enabled_it_speaks_where_nobody_listens():
    _, err = said("from paddle_vpp_ext import log", "log.show()")
    assert err.splitlines() == ["INFO paddle_vpp_ext: hello", "WARNING paddle_vpp_ext: careful"]
    assert said("from paddle_vpp_ext import log", "log.show()", "log.hide()") == ("", "")


def test_what_the_application_configures_counts():
    configure = "import logging; logging.basicConfig(format='mine %(message)s', level=logging.{})"
    show = ("from paddle_vpp_ext import log", "log.show()")
    level = "logging.getLogger('paddle_vpp_ext').setLevel(logging.WARNING)"
    assert said(configure.format("WARNING"), *show)[1].splitlines() == ["mine hello", "mine careful"]
    assert said(configure.format("INFO"), level, *show)[1].splitlines() == ["mine careful"]
    assert said(*show, configure.format("INFO"))[1].splitlines() == ["mine hello", "mine careful"]

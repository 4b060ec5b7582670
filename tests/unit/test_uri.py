"""No part of a buffer's URL that is secret is shown or stands on a command line."""

from __future__ import annotations

import pytest

from rftdata.errors import ConfigError
from rftdata.uri import redacted, split_password


@pytest.mark.parametrize(
    ("uri", "bare", "password"),
    [
        ("./buffer", "./buffer", None),
        ("postgresql://u@h/d", "postgresql://u@h/d", None),
        ("postgresql://u:p%3A1@h:5/d?a%70plication_name=x", "postgresql://u@h:5/d?a%70plication_name=x", "p:1"),
        ("postgresql://:p1@h/d", "postgresql://@h/d", "p1"),
        ("postgresql://u:p1@h/d?password=p2&connect_timeout=3", "postgresql://u@h/d?connect_timeout=3", "p2"),
        ("postgresql://u@h/d?password=p1&password=p2", "postgresql://u@h/d", "p2"),
        ("postgresql://u@h/d?pass%77ord=p1", "postgresql://u@h/d", "p1"),
        ("postgresql://u:p1@h:1,g:2/d", "postgresql://u@h:1,g:2/d", "p1"),
    ],
)
def test_a_password_is_separated(uri: str, bare: str, password: str | None) -> None:
    assert split_password(uri) == (bare, password)
    assert "p1" not in redacted(uri) and "p2" not in redacted(uri)


@pytest.mark.parametrize("uri", ["postgresql://u@h/d?sslpassword=s3cret", "postgresql://u:p@h,v:s3cret@g/d"])
def test_another_secret_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="visible to other users") as refused:
        split_password(uri)
    assert "s3cret" not in str(refused.value)

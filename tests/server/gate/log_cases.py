"""What clients write into requests in order to write into the log. Shared by `logs.py` and the tests of the gate."""

SECRET = "sk-the-secret-key"
PATHS = (
    "/a%0d%0aINFO%20quire.access:%20forged",
    "/%1b%5b31m%1b%5d0;owned%07",
    "/%e2%80%ae%e2%80%a8",
    "/%00%7f",
    "/" + "a" * 5000,
    "/%22%20status=200",
    "/%ff%fe",
    f"/v1/models?key={SECRET}",
    f"/v1/models/{SECRET}",
    f"/v1/models?token=Bearer%20{SECRET}",
)
HEADERS = ("User-Agent", "X-Request-Id", "Referer", "traceparent")
VALUES = ("a\tb", SECRET, "\x9b31m", "i" * 20_000, "status=200 key=root")
LONGEST = 1000
"""Characters of a line."""

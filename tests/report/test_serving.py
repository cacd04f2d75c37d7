"""report --serve: exact tiles from q, k and lse, also from a file, and nothing for anybody else."""

from __future__ import annotations

import http.client
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from headscope import Observe, masks, observe
from headscope.report import serving
from headscope.report._viewer.strips import empty_strips, strip_of
from headscope.report.serving import Server, pooled_tile
from headscope.stats import HeadStats
from headscope.stats._kept_weights import KeptWeights, weights_of
from headscope.watching import About, Recording
from support.serving import running

QUERIES, KEYS = 17, 19


def options() -> dict[str, dict[str, Any]]:
    documents = [torch.tensor([[0] * 8 + [1] * n] * 2) for n in (9, 11)]
    return {
        "causal": {"mask": masks.causal()},
        "documents": {"mask": masks.Documents(*documents)},
        "dense": {"mask": torch.rand(QUERIES, KEYS) > 0.3},
        "heads apart": {"mask": masks.causal() & masks.Dense(torch.rand(2, 6, QUERIES, KEYS) > 0.3)},
        "bias": {"bias": torch.randn(6, QUERIES, KEYS).masked_fill(torch.rand(6, QUERIES, KEYS) < 0.2, -torch.inf)},
        "sinks": {"sinks": torch.randn(6), "mask": masks.window(5)},
        "softcap": {"softcap": 3.0, "scale": 0.7},
        "lengths": {"mask": masks.KeyLengths(torch.tensor([KEYS, 7]))},
        "everything": {},
    }


def recorded(dtype: torch.dtype = torch.float32, **given: Any) -> Recording:
    q, k = torch.randn(2, 6, QUERIES, 8, dtype=dtype), torch.randn(2, 3, KEYS, 8, dtype=dtype)
    found = observe(q, k, what=Observe(map=8, keep_qk=True), **given)
    return Recording(found.named("a"), About("m", {}, {}, {"a": "self"}, None, 1, 1))


@pytest.mark.parametrize("name", options())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiles_of_a_file_are_those_of_the_observation(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    given = {key: x.to(dtype) if key in ("bias", "sinks") else x for key, x in options()[name].items()}
    recording = recorded(dtype, **given)
    wanted = recording.stats.tile(0, QUERIES, 0, KEYS)
    loaded = Recording.load(recording.save(tmp_path / "r.safetensors", qk=True)).stats
    torch.testing.assert_close(loaded.tile(0, QUERIES, 0, KEYS), wanted)
    torch.testing.assert_close(loaded.tile(3, 9, 2, 15), wanted[:, :, 3:9, 2:15])
    again = Recording(loaded, About()).save(tmp_path / "again.safetensors", qk=True)
    torch.testing.assert_close(HeadStats.load(again).tile(3, 9, 2, 15), wanted[:, :, 3:9, 2:15])
    with pytest.raises(ValueError, match=r"j0, j1: got 0, 20, expected 0 <= start <= stop <= 19 \(K\)"):
        loaded.tile(0, 1, 0, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["everything", "causal", "bias", "sinks"])
@pytest.mark.parametrize("std", [30.0, 3e3, 1e4])
def test_tiles_of_a_file_are_exact_where_logits_are_large(
    std: float, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """float32 rounds an lse of 3e7 by 1: every weight of the row would be up to three times as large."""
    random = torch.Generator().manual_seed(0)
    q, k = (std * torch.randn(2, 3, n, 64, generator=random, dtype=torch.float64) for n in (QUERIES, KEYS))
    k[:, :, 1::2] = k[:, :, :-1:2]  # most rows have two keys of the same weight
    given = {key: x.to(dtype)[:3] if key in ("bias", "sinks") else x for key, x in options()[name].items()}
    if name == "sinks":  # of the logits of head 0, and of none
        given["sinks"][0] = (q[0, 0, 3] @ k[0, 0, 2] / 8).to(dtype)
    stats = observe(q.to(dtype), k.to(dtype), what=Observe(keep_qk=True), **given)
    loaded = HeadStats.load(Recording(stats, About()).save(tmp_path / "r.safetensors", qk=True))
    exact = {key: x.double() if key in ("bias", "sinks") else x for key, x in given.items()}
    oracle = observe(q.to(dtype).double(), k.to(dtype).double(), what=Observe(keep_qk=True), **exact)
    expected = oracle.tile(0, QUERIES, 0, KEYS).float()
    assert 0.4 < expected.amax(-1).min() < 0.6 or name == "sinks", "two keys share a row"
    torch.testing.assert_close(loaded.tile(0, QUERIES, 0, KEYS), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        weights_of(stats.parts["0"].last_tiles)(0, QUERIES, 0, KEYS), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("large", [torch.finfo(torch.float32).min, 1e5])
def test_rows_whose_lse_is_rounded_too_far_are_nan(large: float, tmp_path: Path) -> None:
    """Logits beyond what float64 holds to within a small fraction of 1, and files with a float32 lse."""
    q, k = torch.randn(2, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(6, 6)
    bias[2] = large
    stats = observe(q, k, bias=bias, what=Observe(keep_qk=True))
    weights = weights_of(stats.parts["0"].last_tiles)
    if large > 0:
        tensors = weights.tensors()
        weights = KeptWeights.of(tensors | {"lse": tensors["lse"].float()}, (1,), weights.scale, None)
    tile = weights(0, 6, 0, 6)
    assert tile[:, :, 2].isnan().all()
    rows = [0, 1, 3, 4, 5]
    torch.testing.assert_close(tile[:, :, rows], stats.tile(0, 6, 0, 6)[:, :, rows])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_of_a_row_that_sees_nan_a_tile_is_nan(masked: bool, spoilt: float, tmp_path: Path) -> None:
    q, k = torch.randn(1, 2, 6, 8).abs(), torch.randn(1, 2, 6, 8)
    k[0, 0, 2] = spoilt
    seen = torch.ones(6, 6, dtype=torch.bool).tril() & (torch.arange(6) != 4)[:, None] if masked else None
    stats = observe(q, k, mask=seen, what=Observe(keep_qk=True))
    saved = Recording(stats, About()).save(tmp_path / "r.safetensors", qk=True)
    for found in (stats, HeadStats.load(saved)):
        tile = found.tile(0, 6, 0, 6)
        there = torch.ones(6, 6, dtype=torch.bool) if seen is None else seen
        rows = there[:, 2]
        assert tile[0, 0][rows].isnan().equal(there[rows])  # what it may not see stays 0
        assert tile[0, 0][~rows].isfinite().all()
        assert tile[0, 1].isfinite().all()
        torch.testing.assert_close(tile[0, 1].sum(-1), there.any(-1).float())
        assert found.broken.tolist() == [int(rows.sum()), 0]


def test_without_qk_none_is_saved(tmp_path: Path) -> None:
    plain = Recording.load(recorded().save(tmp_path / "r.safetensors")).stats
    with pytest.raises(ValueError, match=r"tile: q and k were not retained"):
        plain.tile(0, 1, 0, 1)
    with pytest.raises(ValueError, match=r"expected a recording with q and k: watch --keep-qk"):
        Server(Recording(plain, About()))


def test_a_mask_too_large_to_be_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope._observe.kept_tiles.MOST_REST", 10)
    recording = recorded(**options()["documents"] | {"mask": options()["documents"]["mask"] & ~odd()})
    with pytest.raises(ValueError, match=r"mask: .* has more than 10 pairs, too many to save with q and k"):
        recording.save(tmp_path / "r.safetensors", qk=True)
    assert list(tmp_path.iterdir()) == []


def odd() -> Any:
    """A mask that is no spans: handed in as a subclass that only knows ``allows``."""
    return NotOdd()


class NotOdd(masks.Mask):
    def __invert__(self) -> NotOdd:
        return self

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return torch.as_tensor((i + j) % 3 != 1)


def naive(p: np.ndarray[Any, Any], rows: int, columns: int, what: Any) -> np.ndarray[Any, Any]:
    cut = [[n * size // bins for n in range(bins + 1)] for size, bins in zip(p.shape, (rows, columns), strict=True)]
    found = np.full((rows, columns), np.nan)
    for r in range(rows):
        for c in range(columns):
            part = p[cut[0][r] : cut[0][r + 1], cut[1][c] : cut[1][c + 1]]
            if not np.isnan(part).all():
                found[r, c] = what(part)
    return found


def test_tiles_are_pooled_by_bins() -> None:
    kept = weights_of(recorded(mask=masks.causal()).stats.parts["a"].last_tiles)
    p = kept.piece(0, 4, (2, 17), (1, 12)).double().numpy()
    for size in (1, 4, 7, 15):
        mean, largest = pooled_tile(kept, 4, (2, 17), (1, 12), size)
        rows, columns = min(size, 15), min(size, 11)
        np.testing.assert_allclose(mean, naive(p, rows, columns, np.nanmean), rtol=1e-6)
        np.testing.assert_allclose(largest, naive(p, rows, columns, np.nanmax), rtol=1e-6)


def test_the_default_device_does_not_matter() -> None:
    kept = weights_of(recorded(mask=masks.causal()).stats.parts["a"].last_tiles)
    strips = empty_strips(kept, [1])
    assert strips is not None
    asked = (
        lambda: pooled_tile(kept, 1, (2, 17), (1, 12), 5),
        lambda: strip_of(kept, 1, (2, 17), strips),
    )
    wanted = [run() for run in asked]
    with torch.device("meta"):
        found = [run() for run in asked]
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])


# ---------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    torch.manual_seed(0)
    with running(Server(recorded(mask=masks.causal()))) as opened:
        yield opened


def ask(server: Server, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(headers.pop("method", "GET"), path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def test_a_tile_is_exact(server: Server) -> None:
    kept = server.weights[0]
    assert isinstance(kept, KeptWeights)
    query = "layer=0&head=5&i0=3&i1=16&j0=2&j1=19&size=512"
    status, content, headers = ask(server, f"/{server.token}/tile?{query}")
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/octet-stream", "no-store")
    both = np.frombuffer(content, "<f4").reshape(2, 13, 17)
    wanted = kept.piece(0, 5, (3, 16), (2, 19)).numpy()
    np.testing.assert_array_equal(both, np.stack([wanted, wanted]))
    status, content, _ = ask(server, f"/{server.token}/strip?layer=0&head=1&i0=0&i1=17")
    strip = np.frombuffer(content, np.uint8).reshape(17, 32 + 4)
    p = kept.piece(0, 1, (0, 17), (0, 19)).numpy()
    assert status == 200
    near, first = strip[9, 32 - 12 : 32], strip[9, 32:]
    codes = np.rint(np.sqrt(p[9, :12]) * 254)
    np.testing.assert_array_equal(near, codes, "query 9 stands at 11")
    np.testing.assert_array_equal(first, codes[:4])
    assert set(strip[9, : 32 - 12]) == {255}, "there is no key at -1"


def test_the_page_is_at_a_random_path_alone(server: Server) -> None:
    status, content, headers = ask(server, urlsplit(server.url).path)
    assert (status, headers["Content-Type"], content) == (200, "text/html; charset=utf-8", server.page)
    assert b"connect-src 'self'" in content
    assert len(server.token) == 32
    assert server.server_address[0] == "127.0.0.1", "loopback only"
    token = server.token
    wrong = "x" * 32
    for path in (
        "/", "//", f"/{token}", f"/{wrong}/", f"/{wrong}/tile?layer=0", "/../etc/passwd", f"/{token}/../../etc/passwd",
        f"/{token}/%2e%2e/%2e%2e/etc/passwd", f"/{token}//etc/passwd", f"/{token}/index.html", "/tile?layer=0",
        f"/{token[:-1]}%C3%A9/",
    ):  # fmt: skip
        assert ask(server, path)[:2] == (404, b"not here\n"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, f"/{token}/", method=method)[0] == 501


def test_another_name_for_this_machine_is_refused(server: Server) -> None:
    path = urlsplit(server.url).path
    port = server.server_address[1]
    assert ask(server, path, Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", ""):
        assert ask(server, path, Host=host)[:2] == (403, b"wrong host\n"), host


@pytest.mark.parametrize(
    ("hosts", "code"),
    [
        (["localhost:PORT", "evil.example"], 400),
        (["evil.example", "localhost:PORT"], 400),
        (["localhost:PORT", "localhost:PORT"], 400),
        (["localhost:PORT"], 200),
    ],
)
def test_a_request_with_two_host_headers_is_refused(hosts: list[str], code: int, server: Server) -> None:
    port = str(server.server_address[1])
    headers = "".join(f"Host: {host}\r\n" for host in hosts).replace("PORT", port)

    answer = send(server, f"GET /{server.token}/ HTTP/1.0\r\n{headers}\r\n".encode())

    assert answer.status == code


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("http://evil.example/TOKEN/", 403),
        ("http://evil.example:PORT/TOKEN/", 403),
        ("http://localhost:PORT@evil.example/TOKEN/", 403),
        ("http://evil.example@localhost:PORT/TOKEN/", 403),
        ("https://localhost:PORT/TOKEN/", 403),
        ("file:///TOKEN/", 403),
        ("http:/TOKEN/", 403),
        ("http://localhost:PORT/TOKEN/", 200),
        ("http://127.0.0.1:PORT/TOKEN/", 200),
    ],
)
def test_an_absolute_target_must_name_this_server(target: str, code: int, server: Server) -> None:
    port = str(server.server_address[1])
    path = target.replace("TOKEN", server.token).replace("PORT", port)

    answer = send(server, f"GET {path} HTTP/1.0\r\nHost: localhost:{port}\r\n\r\n".encode())

    assert answer.status == code


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("tile", "layer: expected 0 to 0"),
        ("tile?layer=1", "layer: expected 0 to 0"),
        ("tile?layer=0&head=6", "head: expected 0 to 5"),
        ("tile?layer=0&head=0&i0=0&i1=18", "i1: expected 1 to 17"),
        ("tile?layer=0&head=0&i0=5&i1=5", "i1: expected 6 to 17"),
        ("tile?layer=0&head=0&i0=-1&i1=5", "i0: expected 0 to 16"),
        ("tile?layer=0&head=0&i0=0&i1=5&j0=0&j1=5&size=513", "size: expected 1 to 512"),
        ("tile?layer=0&head=0&i0=0&i1=5&j0=0&j1=5&size=1e3", "expected whole numbers"),
        ("tile?layer=0&head=0&i0=0&i1=5&j0=0&j1=9999999999", "j1: expected 1 to 19"),
        *(
            (f"tile?layer={text}&head=0&i0=0&i1=5&j0=0&j1=5", "expected whole numbers")
            for text in ("", "0_0", "%200", "%2B0", "%D9%A0", "00000000000", "0&layer=0")
        ),
        ("tile?" + "&".join(["a=1"] * 17), "expected whole numbers"),
        ("strip?layer=0&head=0&i0=0&i1=18", "i1: expected 1 to 17"),
    ],
)
def test_what_is_out_of_bounds_is_refused(query: str, said: str, server: Server) -> None:
    assert ask(server, f"/{server.token}/{query}")[:2] == (400, f"{said}\n".encode())


@pytest.mark.parametrize(
    ("line", "header", "code"),
    [
        ("GET http://[/x HTTP/1.0", "", 400),
        ("GET http://[x]/TOKEN/ HTTP/1.0", "", 400),
        ("GET //]/TOKEN/ HTTP/1.0", "", 404),
        ("GET / x HTTP/1.0", "", 400),
        ("GET /TOKEN/../../etc/passwd HTTP/1.0", "", 404),
        ("GET /%00\xff HTTP/1.0", "", 404),
        ("GET /TOKEN/tile?layer=%00%zz HTTP/1.0", "", 400),
        ("GET /TOKEN/ HTTP/1.0", "Host: \xff", 403),
        ("GET /TOKEN/ HTTP/1.0", f"X: {'x' * 70_000}", 431),
    ],
)
def test_what_is_no_request_is_refused_without_a_word(
    line: str, header: str, code: int, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    port = server.server_address[1]
    lines = [line.replace("TOKEN", server.token), header or f"Host: 127.0.0.1:{port}", "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == code
        assert b"root:" not in answer.read()
    assert capsys.readouterr().err == ""


def test_requests_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(server, f"/{server.token}/tile?{'x' * 600}")[0] == 414
    monkeypatch.setattr(serving, "MOST_PAIRS", 10)
    query = "layer=0&head=0&i0=0&i1=5&j0=0&j1=5&size=2"
    assert ask(server, f"/{server.token}/tile?{query}")[:2] == (400, b"i0 to j1: expected at most 10 pairs\n")
    monkeypatch.setattr(serving, "STRIP", 3)
    query = "layer=0&head=0&i0=0&i1=5"
    assert ask(server, f"/{server.token}/strip?{query}")[:2] == (400, b"i0, i1: expected at most 3 queries\n")


SECURE = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch, **limits: float) -> Iterator[Server]:
    """A server with other limits."""
    for name, value in limits.items():
        monkeypatch.setattr(serving, name, value)
    with running(Server(recorded(mask=masks.causal()))) as made:
        yield made


def send(server: Server, request: bytes) -> http.client.HTTPResponse:
    """The answer to these bytes; its body has been read."""
    with socket.create_connection(server.server_address[:2], timeout=10) as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.read()
    return answer


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ("GET /TOKEN/ HTTP/1.0\r\nHost: localhost:PORT\r\n\r\n", 200),
        ("GET /TOKEN/ HTTP/1.0\r\n\r\n", 403),
        ("GET / HTTP/1.0\r\nHost: localhost:PORT\r\n\r\n", 404),
        ("GET /TOKEN/tile HTTP/1.0\r\nHost: localhost:PORT\r\n\r\n", 400),
        ("GET / x HTTP/1.0\r\n\r\n", 400),
        ("nonsense\r\n\r\n", 400),
        ("POST /\r\n\r\n", 400),
        ("GET /\r\n\r\n", 403),
        ("GET / HTTP/x\r\n\r\n", 400),
        ("GET / HTTP/2.0\r\n\r\n", 505),
        ("POST / HTTP/1.0\r\n\r\n", 501),
        ("<script> / HTTP/1.0\r\n\r\n", 501),
        (f"GET /{'x' * 600} HTTP/1.0\r\nHost: localhost:PORT\r\n\r\n", 414),
        (f"GET /{'x' * 70_000} HTTP/1.0\r\n\r\n", 414),
        (f"GET / HTTP/1.0\r\nX: {'x' * 70_000}\r\n\r\n", 431),
        ("GET / HTTP/1.0\r\n" + "X: y\r\n" * 200 + "\r\n", 431),
    ],
)
def test_every_answer_has_the_security_headers(request_: str, code: int, server: Server) -> None:
    port = str(server.server_address[1])
    answer = send(server, request_.replace("TOKEN", server.token).replace("PORT", port).encode())
    headers = dict(answer.getheaders())
    assert answer.status == code
    assert SECURE.items() <= headers.items()
    assert headers["Content-Type"] == ("text/html; charset=utf-8" if code == 200 else "text/plain")


def test_an_error_repeats_nothing_of_the_request(server: Server) -> None:
    with socket.create_connection(server.server_address[:2], timeout=10) as connection:
        connection.sendall(b"<script>alert(1)</script> / HTTP/1.0\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert answer.endswith(b"\r\n\r\nnot implemented\n")


def test_a_request_that_trickles_in_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes well before the deadline, and the request never ends."""
    with opened(monkeypatch, SECONDS=0.3) as server:
        with socket.create_connection(server.server_address[:2], timeout=10) as slow:
            slow.settimeout(0.05)
            ended = False
            for byte in b"GET /" + b"x" * 60:
                slow.send(bytes([byte]))
                try:
                    ended = slow.recv(1) == b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    ended = True
                break
            assert ended
        assert ask(server, urlsplit(server.url).path)[0] == 200


def test_slow_connections_do_not_lock_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, SECONDS=0.3, CONNECTIONS=4) as server:
        path = urlsplit(server.url).path
        slow = [socket.create_connection(server.server_address[:2], timeout=10) for _ in range(4)]
        for each in slow:
            each.send(b"GET")
        status = 503
        for _ in range(200):
            status, _, _ = ask(server, path)  # answered always: 503 until the deadline has passed
            if status == 200:
                break
            assert status == 503
            threading.Event().wait(0.02)
        for each in slow:
            each.close()
        assert status == 200


def test_more_requests_than_there_is_room_for_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, CONNECTIONS=3) as server:
        silent = [socket.create_connection(server.server_address[:2], timeout=10) for _ in range(3)]
        found: list[tuple[int, bytes, dict[str, str]]] = []
        threads = [
            threading.Thread(target=lambda: found.append(ask(server, urlsplit(server.url).path))) for _ in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in silent:
            each.close()
    assert len(found) == 40
    assert {status for status, _, _ in found} == {503}
    for _, content, headers in found:
        assert content == b"busy\n"
        assert headers["Retry-After"] == "1"
        assert SECURE.items() <= headers.items()


def test_two_hundred_requests_at_once_are_answered(server: Server) -> None:
    path = urlsplit(server.url).path
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(ask(server, path)[0])) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 200


def test_a_silent_connection_without_room_is_answered_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, CONNECTIONS=1, PATIENCE=0.05) as server:
        first, second = (socket.create_connection(server.server_address[:2], timeout=10) for _ in range(2))
        with first, second:
            answer = second.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.0 503 ")

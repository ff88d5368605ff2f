"""Bad inputs: clusters and object storage that are not there, or cannot be meant."""

from __future__ import annotations

from hostile.case import GOOD_SRC, QUANTIZE, Case

ELSEWHERE_CASES = [
    Case("ray-no-address", {QUANTIZE + " --ray here": ("--ray here", "HOST:PORT", "auto", "local")}, GOOD_SRC),
    Case("ray-no-port", {QUANTIZE + " --ray 127.0.0.1:": ("HOST:PORT",)}, GOOD_SRC),
    Case("ray-port-too-large", {QUANTIZE + " --ray 127.0.0.1:65536": ("HOST:PORT",)}, GOOD_SRC),
    Case("ray-client", {QUANTIZE + " --ray ray://127.0.0.1:10001": ("ray://", "node of the cluster")}, GOOD_SRC),
    Case("ray-nobody-answers", {QUANTIZE + " --ray 127.0.0.1:1": ("127.0.0.1:1", "nothing answers there")}, GOOD_SRC),
    Case(
        "ray-unknown-host", {QUANTIZE + " --ray nobody.invalid:6379": ("nobody.invalid", "check the address")}, GOOD_SRC
    ),
    Case("address-unknown-scheme", {"quantize nowhere://bucket/model out": ("nowhere",)}),
    Case("address-without-bucket", {"quantize s3:// out": ("s3://",)}),
    Case("address-with-credentials", {"quantize s3://id:secret@bucket/model out": ("s3://",)}),
    Case("address-of-nothing", {"quantize memory://nothing out": ("memory://nothing",)}),
    Case("address-of-no-master", {"verify memory://nothing": ("memory://nothing",)}),
    Case(
        "address-for-eval",
        {"eval memory://nothing --text eval.txt": ("memory://nothing", "local")},
        {"eval.txt": "text"},
    ),
    Case("output-on-the-hub", {"quantize src hf://org/model": ("hf://org/model", "push")}, GOOD_SRC),
    Case("output-unknown-scheme", {"quantize src nowhere://bucket/out": ("nowhere",)}, GOOD_SRC),
]

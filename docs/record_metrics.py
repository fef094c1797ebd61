"""Records a server's own metrics from Ray's endpoint, for docs/plot_metrics.py.

    python docs/record_metrics.py SECONDS SERIES.json [http://127.0.0.1:PORT/metrics]

Without an address, takes the nodes that Ray lists for Prometheus in /tmp/ray/prom_metrics_service_discovery.json.
"""

import json
import re
import sys
import time
import urllib.request
from pathlib import Path

TARGETS = Path("/tmp/ray/prom_metrics_service_discovery.json")
PERIOD_S = 2.0
OWN_LABELS = ("phase", "position", "reason", "finished_reason", "le")


def read(url: str) -> dict[str, float]:
    """Values by name, with the metric's own label behind a colon; replicas are added up."""
    values: dict[str, float] = {}
    with urllib.request.urlopen(url, timeout=10) as response:
        for line in response.read().decode().splitlines():
            found = re.fullmatch(r"(ray_forerun_\w+)\{(.*)\} (\S+)", line)
            if found is None:
                continue
            labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
            key = ":".join([found[1], *(labels[label] for label in OWN_LABELS if label in labels)])
            values[key] = values.get(key, 0.0) + float(found[3])
    return values


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python docs/record_metrics.py SECONDS SERIES.json [URL]")
    urls = sys.argv[3:]
    if not urls:
        urls = [f"http://{target}/metrics" for part in json.loads(TARGETS.read_text()) for target in part["targets"]]
    samples, start = [], time.time()
    while time.time() - start < float(sys.argv[1]):
        values: dict[str, float] = {}
        for url in urls:
            for key, number in read(url).items():
                values[key] = values.get(key, 0.0) + number
        samples.append({"time_s": time.time() - start, "values": values})
        time.sleep(PERIOD_S)
    Path(sys.argv[2]).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()

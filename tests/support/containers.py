"""Images built and run by buildah and podman, with stand-ins for images that a registry would hold; all in one folder."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from support.oracle import ORACLE
from support.servers import MINIO, missing

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("CONTAINERS_HOME") or Path.home() / ".cache/tiered-containers")
PACKAGES = ("buildah", "podman", "runc", "netavark", "aardvark-dns", "debootstrap")
PYTHON = "python:3.13-slim"
MODULES = "java.se,jdk.unsupported,jdk.management,jdk.naming.dns,jdk.zipfs,jdk.crypto.ec"
ROCKETMQ = "/home/rocketmq/rocketmq-5.3.2"
MAIN = {
    "mqnamesrv": "namesrv.NamesrvStartup",
    "mqbroker": "broker.BrokerStartup",
    "mqadmin": "tools.command.MQAdminStartup",
}
SECONDS_MAX = 600


class Containers:
    """Containers, images, networks and volumes of one test run, apart from those of this machine."""

    def __init__(self, folder: Path) -> None:
        wanted = ("buildah", "podman", "runc", "debootstrap", "/usr/lib/podman/aardvark-dns")
        absent = [name for name in wanted if not shutil.which(name)]
        if os.geteuid() or absent:
            missing(
                f"containers need root and {', '.join(absent or PACKAGES)}"
                " (requirements/system.sh containers)"
            )
        self.folder = folder
        self.environment = os.environ | {
            "CONTAINERS_CONF": str(self._settings()),
            "CONTAINERS_STORAGE_CONF": str(self._storage()),
        }

    def _settings(self) -> Path:
        """Without the right to raise limits, podman's own are too high; runc runs with any cgroups."""
        (files, processes) = (
            resource.getrlimit(one)[1] for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
        )
        path = self.folder / "containers.conf"
        path.write_text(
            f"""[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={min(processes, 32_768)}:{min(processes, 32_768)}"]
[engine]
runtime = "runc"
[network]
network_backend = "netavark"
network_config_dir = "{self.folder}/networks"
"""
        )
        return path

    def _storage(self) -> Path:
        path = self.folder / "storage.conf"
        path.write_text(
            f"""[storage]
driver = "overlay"
graphroot = "{self.folder}/images"
runroot = "{self.folder}/run"
"""
        )
        return path

    def run(self, *words: str | Path, cwd: Path = ROOT, seconds_max: float = SECONDS_MAX) -> str:
        """What a program prints that ends well."""
        done = subprocess.run(
            words, cwd=cwd, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=seconds_max, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()

    def podman(self, *words: str | Path) -> str:
        return self.run("podman", *words)

    def build(self, file: Path, image: str, *options: str, context: Path = ROOT) -> None:
        """Build a container file; pip in it finds its index as pip here does."""
        for path in ("/etc/pip.conf", "/etc/ssl/certs"):
            if Path(path).exists():
                options = (*options, "--volume", f"{path}:{path}:ro")
        self.run(
            *("buildah", "build", "--isolation", "chroot", "--format", "docker", *options),
            *("-t", image, "-f", file, context),
        )

    @cached_property
    def base(self) -> str:
        """A Debian with Python, under the name of the official image."""
        made = self.run("buildah", "from", "scratch")
        self.run("buildah", "add", "--quiet", made, rootfs(), "/")
        self.run("buildah", "commit", "--quiet", made, PYTHON)
        return PYTHON

    def stand_in(self, image: str, lines: Sequence[str], context: Path) -> None:
        """An image on ours that bears another's name, built in a folder that holds what it copies."""
        file = context / "Containerfile"
        file.write_text("\n".join((f"FROM {self.base}", *lines, "")))
        self.build(file, image, context=context)

    def rocketmq(self, image: str) -> None:
        """The broker's own jars of Apache's, laid out as in the official image: user 3000, scripts in ``bin``."""
        context = self._context("rocketmq")
        jdk = Path(os.path.realpath(shutil.which("javac") or "/javac")).parents[1]
        self.run(
            *(jdk / "bin/jlink", "--add-modules", MODULES, "--strip-java-debug-attributes"),
            *("--no-header-files", "--no-man-pages", "--output", context / "java"),
        )
        (context / "lib").mkdir()
        for jar in self.run(ORACLE, "jars").splitlines():
            shutil.copy2(jar, context / "lib")
        (context / "bin").mkdir()
        for name, main in MAIN.items():
            (context / "bin" / name).write_text(
                "exec /opt/java/bin/java -XX:+UseSerialGC --add-exports=java.base/jdk.internal.ref=ALL-UNNAMED"
                " --add-opens=java.base/java.nio=ALL-UNNAMED --add-opens=java.base/sun.nio.ch=ALL-UNNAMED"
                " -Drocketmq.broker.diskSpaceWarningLevelRatio=0.99"  # a machine's disk may be fuller
                " -Drocketmq.broker.diskSpaceCleanForciblyRatio=0.99"
                f" $JAVA_OPT_EXT -cp '{ROCKETMQ}/lib/*' org.apache.rocketmq.{main} \"$@\"\n"
            )
        lines = (
            "RUN groupadd -g 3000 rocketmq && useradd -l -u 3000 -g 3000 -m -s /bin/bash rocketmq",
            "COPY java /opt/java",
            f"COPY --chown=3000:3000 lib {ROCKETMQ}/lib",
            f"COPY --chown=3000:3000 bin {ROCKETMQ}/bin",
            f"ENV ROCKETMQ_HOME={ROCKETMQ}",
            "USER rocketmq",
            f"WORKDIR {ROCKETMQ}/bin",
        )
        self.stand_in(image, lines, context)

    def minio(self, image: str) -> None:
        program = self.run(MINIO, "path")
        if not Path(program).exists():
            missing("MinIO is not built; requirements/system.sh minio builds it")
        context = self._context("minio")
        shutil.copy2(program, context)
        self.stand_in(image, ("COPY minio /usr/bin/minio", 'ENTRYPOINT ["minio"]'), context)

    def prometheus(self, image: str, program: Path) -> None:
        context = self._context("prometheus")
        shutil.copy2(program, context)
        lines = (
            "COPY prometheus /bin/prometheus",
            "RUN mkdir /prometheus && chown 65534:65534 /prometheus",
            "USER 65534",
            "WORKDIR /prometheus",
            'ENTRYPOINT ["/bin/prometheus"]',
            'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]',
        )
        self.stand_in(image, lines, context)

    def _context(self, name: str) -> Path:
        folder = self.folder / "contexts" / name
        folder.mkdir(parents=True)
        return folder

    def close(self) -> None:
        """End what runs, and remove all."""
        for words in (
            ("podman", "pod", "rm", "--all", "--force", "--time", "0"),
            ("podman", "rm", "--all", "--force", "--time", "0"),
            ("podman", "network", "prune", "--force"),
            ("buildah", "rm", "--all"),
            ("umount", "--lazy", str(self.folder / "images/overlay")),  # podman leaves it mounted
        ):
            subprocess.run(words, env=self.environment, capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def rootfs() -> Path:
    """An archive of a small Debian with Python and pip, of this machine's release, made once."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
    ).get("VERSION_CODENAME", "stable")
    archive = CACHE / f"{release}.tar"
    if archive.exists():
        return archive
    CACHE.mkdir(parents=True, exist_ok=True)
    tree = CACHE / f"{release}.{os.getpid()}"
    bootstrap = (
        "debootstrap",
        "--variant=minbase",
        "--include=python3,python3-pip,ca-certificates",
    )
    done = subprocess.run(
        (*bootstrap, release, tree),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    if done.returncode:
        missing(f"debootstrap makes no Debian: {done.stdout[-300:]}{done.stderr[-300:]}")
    for managed in tree.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        managed.unlink()  # the official image takes what pip installs
    (tree / "usr/bin/python").symlink_to("python3")
    left = ("--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*")
    made = tree.with_suffix(".tar")
    subprocess.run(("tar", "-C", tree, *left, "-cf", made, "."), check=True)
    shutil.rmtree(tree)
    made.rename(archive)
    return archive

"""Real servers for DVC remotes on this machine's loopback: S3 by moto, SFTP by asyncssh.

    python -m remote_servers FOLDER KEY

serves `FOLDER` over SFTP to whoever holds the private key `KEY`, and says on which port.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread


@contextmanager
def server(*command: str) -> Iterator[int]:
    """The port of `python -m <command>`, which writes where it runs to stderr as soon as it does."""
    started = [sys.executable, "-m", *command]
    with subprocess.Popen(started, cwd=Path(__file__).parent, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        try:
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"[Rr]unning on \S*127\.0\.0\.1:(\d+)", line):
                    # It says a line for each request, and would stop where nobody reads them.
                    Thread(target=process.stderr.read, daemon=True).start()
                    yield int(found[1])
                    break
            else:
                raise AssertionError(f"{' '.join(command)} has ended: {''.join(said)}")
        finally:
            process.kill()


async def serve_files(folder: Path, key: Path) -> None:
    """SFTP until it is killed, with `folder` as the root."""
    import asyncssh

    def chrooted(channel: asyncssh.SSHServerChannel) -> asyncssh.SFTPServer:
        return asyncssh.SFTPServer(channel, chroot=str(folder).encode())

    private = asyncssh.generate_private_key("ssh-ed25519")
    private.write_private_key(key)
    key.chmod(0o600)
    allowed = asyncssh.import_authorized_keys(private.export_public_key().decode())
    listener = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=allowed,
        sftp_factory=chrooted,
    )
    print(f"running on 127.0.0.1:{listener.get_port()}", file=sys.stderr, flush=True)
    await listener.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve_files(Path(sys.argv[1]), Path(sys.argv[2])))

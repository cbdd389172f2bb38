"""Monitor, expert servers and clients as processes, to which a fault script is done; the same as in simulation."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import network_hosts
from coterie.errors import EngineError
from coterie.experts.monitor.calls import ask
from coterie.experts.monitor.messages import Status
from coterie.experts.transport.shared import PREFIX
from coterie.shm import sweep
from coterie.up.ports import PortChooser
from fault_scripts import CLIENTS, SERVERS

TESTS = Path(__file__).parent
TINY = TESTS.parent / "models" / "coterie-tiny"
SERVED = {name: ("0-31", "32-63")[half] for name, half in SERVERS.items()}
TIMES = ("--heartbeat-s", "0.1", "--suspect-after-s", "0.6", "--dead-after-s", "1.5")
LONG_S = 60.0
_SLOW_S = 0.15, 0.05  # stopped, running: a quarter of its speed


class ClientProcess:
    """What a client says."""

    def __init__(self, process):
        self.process, self.last = process, None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.last = json.loads(line)


@dataclass(frozen=True)
class Hosts:
    """Where processes run, if not on this host: monitor and clients on the hub, each server on a spoke of its own."""

    hub: network_hosts.Host
    spokes: dict[str, network_hosts.Host]


class ProcessWorld:
    """The processes by name; a context manager, which kills them.

    Args:
        folder: for their logs.
        servers: the experts of each, by name.
        clients: their names.
        load: tokens of a call, and calls in flight, of each client.
        options: of all servers.
        hosts: where they run; None for this host, all of them.
    """

    def __init__(self, folder, *, servers=SERVED, clients=CLIENTS, load=(), options=(), hosts=None):
        self.servers, self.names_of_clients = servers, clients
        self.load, self.options, self.hosts = [str(one) for one in load], options, hosts
        self.folder, self.processes, self.clients, self.slowed = folder, {}, {}, {}
        (self.port,) = PortChooser(os.getpid()).ports(0, 1, "monitor")
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        for name in ("monitor", *self.servers):
            self.play("start", name)
        self.until_known()
        for name in self.names_of_clients:
            self.play("start", name)
        self.until(lambda: all(client.last for client in self.clients.values()), "clients to begin")
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        sweep(PREFIX)  # killed servers leave their memory to the next one that starts

    # --- what is done ----------------------------------------------------------------------------------

    def run(self, script, pace=0.6):
        """Do it, at its times times `pace`."""
        began_s = time.monotonic()
        for step in sorted(script, key=lambda step: step.at_s):
            time.sleep(max(0.0, began_s + pace * step.at_s - time.monotonic()))
            self.play(step.what, step.who)

    def play(self, what, who):
        if what == "start":
            self._start(who)
        elif what in ("slow", "fast"):
            self._slow(who, on=what == "slow")
        elif what in ("cut", "mend"):
            self.hosts.spokes[who].set_link("down" if what == "cut" else "up")
        else:
            signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "go on": signal.SIGCONT, "drain": signal.SIGTERM}
            self.processes[who].send_signal(signals[what])
            if what == "kill":
                self.processes[who].wait()

    def _start(self, who):
        if who in self.processes:
            self.processes[who].wait(LONG_S)
        if who in self.names_of_clients:
            program, out = "from expert_client import main; main(*sys.argv[1:])", subprocess.PIPE
            arguments = self.url, str(TINY), who, *self.load
        else:
            program, out = "from coterie.cli import main; main()", subprocess.DEVNULL
            arguments = "experts", *self._command(who)
        code = f"import sys; sys.path.append({str(TESTS)!r}); {self._enter(who)}; {program}"
        command = sys.executable, "-c", code, *arguments
        with (self.folder / f"{who}.log").open("a") as log:
            environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
            self.processes[who] = subprocess.Popen(command, stdout=out, stderr=log, env=environment)
        if who in self.names_of_clients:
            self.clients[who] = ClientProcess(self.processes[who])

    def _command(self, who):
        if who == "monitor":
            everywhere = ("--host", self.hosts.hub.address) if self.hosts else ()
            return ("monitor", "--port", str(self.port), *everywhere, *TIMES)
        what = ("--experts", self.servers[who], "--name", who, "--monitor")
        if self.hosts is None:
            return ("serve", str(TINY), *what, self.url, *self.options)
        spoke = self.hosts.spokes[who]
        where = (f"http://{spoke.peer}:{self.port}", "--host", spoke.address, "--tcp-port", "0")
        return ("serve", str(TINY), *what, *where, *self.options)

    def _enter(self, who):
        """Python that takes a process to its host."""
        if self.hosts is None:
            return "pass"
        return f"import network_hosts; network_hosts.enter({self.hosts.spokes.get(who, self.hosts.hub).name!r})"

    def _slow(self, who, *, on):
        if on:
            over = self.slowed[who] = threading.Event()
            threading.Thread(target=self._stutter, args=(self.processes[who], over)).start()
        else:
            self.slowed.pop(who).set()

    @staticmethod
    def _stutter(process, over):
        stopped_s, running_s = _SLOW_S
        while not over.wait(running_s):
            process.send_signal(signal.SIGSTOP)
            time.sleep(stopped_s)
            process.send_signal(signal.SIGCONT)

    # --- what is seen ----------------------------------------------------------------------------------

    def until_known(self):
        """Wait until the monitor says of each server that runs that it serves, and of no other."""
        running = sorted(name for name in self.servers if self.runs(name))
        self.until(lambda: self.known() == [(name, "serving") for name in running], f"{running} to be known as serving")

    def known(self):
        """Name and state of each server that the monitor does not think dead."""
        try:
            rows = self._ask(self.url, "GET", "/status", Status).servers
        except EngineError:
            return None
        return sorted((row.name, row.state) for row in rows if row.state != "dead")

    def _ask(self, *question):
        return self.hosts.hub.call(ask, *question) if self.hosts else ask(*question)

    def runs(self, name):
        return name in self.processes and self.processes[name].poll() is None

    def until(self, look, what):
        end_s = time.monotonic() + LONG_S
        while not look():
            if time.monotonic() > end_s:
                raise TimeoutError(f"waited for {what}; {self.known()}; logs in {self.folder}")
            time.sleep(0.02)


def play_and_check(world, script):
    """Make the world whole, whatever was done to it before, play a script, and see that no client was the worse."""
    for name in world.processes:
        if not world.runs(name):
            world.play("start", name)
    world.until_known()
    world.until(lambda: all(client.last for client in world.clients.values()), "clients to begin")
    before = {name: client.last["done"] for name, client in world.clients.items()}
    world.run(script)
    world.until_known()
    for name in filter(world.runs, world.clients):
        client = world.clients[name]
        world.until(lambda client=client: len(client.last["servers"]) == len(world.known()), "tables")
        assert client.last["failed"] == []
        assert client.last["wrong"] == 0
        assert client.last["done"] > before[name]

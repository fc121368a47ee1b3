"""Agents that are played, for tests of the supervisor's protocol."""

from __future__ import annotations

from meshwright.launch.placement import Device, Placement


class PlayedNodes:
    """Three nodes; the layout has a rank on nodes 0 and 1. Each call of ``wait`` plays the next batch."""

    count, interface = 3, "lo"
    placement = Placement((Device(0, 0), Device(1, 0)))

    def __init__(self, *batches, nodes=(0, 1, 2), spares=0):
        self.batches, self.nodes, self.spares = list(batches), frozenset(nodes), spares
        self.sent = []

    def node_of(self, rank):
        return self.placement.devices[rank].node

    def name(self, node):
        return f"node {node}"

    def wait(self, timeout_s):
        assert self.batches, f"the supervisor waits for a message that never comes; sent: {self.sent}"
        batch = self.batches.pop(0)
        for message in batch:
            if message["is"] == "agent_lost":
                self.nodes -= {message["node"]}
            if message["is"] == "node_joined":
                self.nodes |= {message["node"]}
        return batch

    def send_to_node(self, node, message):
        if node in self.nodes:
            self.sent.append((message["do"], node, message.get("generation")))

    def send(self, rank, message):
        command = message.get("command", {})
        if self.node_of(rank) in self.nodes:
            self.sent.append((message["do"], rank, command.get("action"), command.get("generation")))

    def host(self, node):
        return f"host-{node}"

    def release(self, node):
        self.sent.append(("release", node))
        self.nodes -= {node}

    def broadcast(self, message):
        for node in self.nodes:
            self.send_to_node(node, message)

    def allow_redial(self, allowed):
        pass

    def close(self, ok=True):
        pass


class FoundPlan:
    """What the planner returns."""

    step_s = 1.0


def ready(rank, generation):
    event = {"event": "ready", "generation": generation, "step": 10, "peak_flops_per_s": 1.0, "setup_s": {}}
    return {"is": "event", "rank": rank, "node": rank, "event": {**event, "rank": rank}}


def exited(rank, status=0):
    return {"is": "exited", "rank": rank, "node": rank, "status": status}


def starts(agents):
    return [sent for sent in agents.sent if sent[0] in ("start", "command") and sent[2] == "join"]

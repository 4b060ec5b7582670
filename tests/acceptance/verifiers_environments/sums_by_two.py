"""An environment of the package verifiers with two agents: one solves, the other checks the answer. It is written for that package alone."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        return [SumTask(SumData(prompt="What is 1 + 1?", answer="2"), self.config.task)]


class CheckedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    checker: vf.AgentConfig = vf.AgentConfig()
    checker_learns: bool = True


class CheckedEnv(vf.Env[CheckedConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.checker.trainable = self.config.checker_learns

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        solved = await agents.solver.run(task)
        await agents.checker.run(vf.Task(vf.TaskData(idx=0, prompt=f"Is this right? {solved.last_reply}")))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        solved, checked = episode.traces
        checked.record_reward("agrees", float(("yes" in checked.last_reply) == (solved.reward > 0)))


__all__ = ["CheckedEnv", "SumTaskset"]

"""An environment of the package verifiers: several turns with a tool. It is written for that package alone."""

import verifiers.v1 as vf


class AddToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [AddToolset(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        return [SumTask(SumData(prompt="What is 17 + 25?", answer="42"), self.config.task)]


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    AddToolset.run()

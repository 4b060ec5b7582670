"""The final output of `rft run`: the table, the learning curve, the places of files, and commands to try next."""

from __future__ import annotations

from pathlib import Path

from rftcore.launch.terminal.views import View
from rftcore.reporting.learning_curve import write_learning_curve
from rftcore.reporting.report import build_report
from rftcore.reporting.table import print_report
from rftcore.run.commands import buffer_option
from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.run import Run


def show_results(buffer: Buffer, run: Run, view: View) -> None:
    """Print the final table and the next commands; write the learning curve beside the run's checkpoints.

    A picture that cannot be written causes only a warning, because the results are in the buffer.
    """
    report = build_report(buffer, run.name)
    option = buffer_option(buffer.location)
    if run.mode == "eval":
        view.close()
        print_report([report])
        print(f"""
Try next:
  rft report {run.name} OTHER{option}   # question by question against another run
  rft sql{option} "select task_key, answer_index, reward, response, error from rft.v_evaluation_answer where run = '{run.name}' limit 5" """)
        return
    picture = str(run.folder / "learning_curve.png")
    try:
        write_learning_curve(report, Path(picture))
    except QueryError as error:
        view.message(f"warning: {error}")
        picture = f"rft report {run.name}{option} --png FILE"
    view.close()
    print_report([report])
    print(f"""
buffer          {buffer.location}
learning curve  {picture}

Try next:
  rft report {run.name}{option}
  rft status{option}
  rft sql{option} "select prompt, response, answer, reward, state, dropped_because from rft.v_experience limit 5"
  rft sql{option} "select * from rft.v_dropped"
  rft query{option} "select experience_id, len(token_ids) as tokens from experience limit 5"
  rft sql{option} "update rft.experience set reward = 1 where experience_id = 1"   # a relabel, with history
  rft label history 1{option}""")

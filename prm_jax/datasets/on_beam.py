"""Where Apache Beam runs the writing of a dataset's shards.

TFDS writes each shard of a `ShardBasedBuilder` in a worker.  Workers on other machines must see
the folders of the source and of the output.  The files are those that one process writes.
"""

from __future__ import annotations

import dataclasses

import tensorflow_datasets as tfds


@dataclasses.dataclass(frozen=True)
class Beam:
  """A runner of Apache Beam."""

  runner: str = ""
  """DirectRunner, or another of Apache Beam's; "": in this process, without Beam."""
  options: tuple[str, ...] = ()
  """The runner's own, without dashes: direct_num_workers=4 direct_running_mode=multi_processing."""

  def download_config(self) -> tfds.download.DownloadConfig | None:
    """The setting that makes TFDS use the runner; None without one.

    Raises:
      ValueError: Beam is not installed, or has no such option.
    """
    if not self.runner:
      if self.options:
        raise ValueError("--beam.options need --beam.runner too, such as DirectRunner")
      return None
    try:
      from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
      raise ValueError(
        f"--beam.runner={self.runner} needs Apache Beam ({error}); install it with "
        "python -m pip install '.[beam]', or leave the runner out: the output is the same"
      ) from error
    options = PipelineOptions([f"--{option}" for option in self.options])
    known = options.get_all_options()
    if unknown := [o for o in self.options if o.partition("=")[0] not in known]:
      raise ValueError(f"--beam.options: Apache Beam has no {', '.join(unknown)}")
    return tfds.download.DownloadConfig(beam_runner=self.runner, beam_options=options)

"""Everything a run says: lines, panel, records, picture, other services.

display      what a person sees of a run: plain lines, or on a terminal a panel with notes above it
fp8_picture  FP8 telemetry as a picture
fp8_records  FP8 telemetry of a run on disk: one file for each pipeline stage, beside the metrics
metrics      one JSON record per report, each whole and on its way to the disk before training goes
             on
moe_metrics  how evenly the experts of every layer were used since the last report: records, one
             line, TensorBoard
output       everything a run says, put together: display, records, speed, communication, and the
             picture at its end
picture      a run over its tokens as an SVG: loss, learning rate and throughput, from the records
             that it wrote
quantities   figures as people read them: durations, sizes, a few significant digits
summary      the end of a run: its outcome, its validation loss beside that of n-grams, commands to
             go on with
tensorboard  the records of a run as TensorBoard scalars, through torch's own writer
throughput   how fast the steps since the last report were: tokens, operations, share of the
             device's peak
wandb        the records of a run as a Weights & Biases run; offline unless somebody said otherwise
"""

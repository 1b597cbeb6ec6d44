"""The report of a run: `report.json` for programs, `report.html` for people, and the table that ends a run on the terminal.

All three are made from one dict, `results`, the content of `report.json`. A section of the page appears only if its data are
there, so a run that stopped early still has a report. The table is made from

    dense, sparse: {metrics: {error | rmse, r2, nll, ...}, parameters, nonzero, weights, weights_nonzero, bytes, macs,
        latency_ms: {batch_1, batch_128}}
    compression: ratios of the same names (`svdcompress.cost.compression`)
    changes: {error | rmse, nll: {low, high}}, the 95% interval of sparse minus dense on the same test examples

and these keys are known as well, all optional:

    format: the version of this layout (1; missing in files of version 0.1.0). files: {name: {sha256, bytes}} of the folder's
        files, except the report's own. verified: the checks that the run made of its files at its end
    name, description, created, seed, device, versions, seconds: {stage: s}, threads (used to measure latency), clock (which
        latencies are measured by, "CPU time" or "wall-clock time"), torch_threads (PyTorch's, from the first training on),
        recover_lr (a learning rate for recovery, if the recipe's made the network worse), warnings: [text]
    notes: [text], what the run did without being asked; failed: {figure that could not be computed: why}
    threshold: the limit on log alpha that was used
    layers: [{name, type, shape_before, shape_after, sparsity, inputs_before, inputs, outputs_before, outputs (remaining units),
        parameters_before, parameters, macs_before, macs}]
    parity: {file: largest absolute difference from PyTorch}
    history: [{stage, epoch, loss, nll, kl, beta, sparsity, val_error, lr}], in the order of training
    log_alpha: {layer: {edges, counts, threshold}}
    threshold_curve: [{threshold, error | rmse, nll, nonzero}]
    calibration: {model: {confidence, accuracy, count, ece}}, one number for each bin
    uncertainty: {model: {figure: number}}; uncertainty_of: {examples, test, samples, asked, text}, what they were computed from
    doubts: [{example, truth, guess, confidence, entropy, mutual_information, picture}], the test examples that the small model
        is least sure of; picture: {shape: (height, width[, 3]), base64: its bytes}
    pruning: {groups: [{name, removed, kept, kept_unrounded, reason}], inputs_kept, inputs_gathered, max_error, seconds,
        round_to, rounded, rounding: {rounded, unrounded: {kept, parameters, latency_ms}}, parameters_after,
        parameters_unrounded, notes}
    search: {objective, goal, max_drop, max_error, confidence, measured: {batches, threads, clock, machine, onnxruntime} or
        {command} (of a latency), dense: {error, costs}, least, validation_examples, path: [{level, beta, error, nll, nonzero}],
        trials: [as `svdcompress.search.Trial`], chosen, met, reached, epochs: {search, one_run}, seconds, notes}
    filters: {layer: {before, after}}: nested lists of shape (filters, inputs[, height, width])
    pictures: [{title, file, dark, caption}]: PNG, SVG or JPEG files in the run's folder (dark: one for the dark page, if any)
    (evaluation/evaluation.json in the run's folder, if `svdc evaluate` has been run, gets a section of its own)
    experiment: the experiment's name; with it, tables of its own, {row: {figure: number}} under any key, are shown, and
        sparsity: {weights, kept}
    recipe: the resolved recipe as text
"""

from svdcompress.report._broken import SectionWarning
from svdcompress.report._collect import first_filters, log_alpha_histograms
from svdcompress.report._files import load, plain, write_json, write_text
from svdcompress.report._integrity import FORMAT, altered, digest, stamped
from svdcompress.report._rows import Row, rows
from svdcompress.report._schema import MeasuredWith, Mixture, Results
from svdcompress.report._terminal import table
from svdcompress.report._tradeoff import Curve, plot_tradeoff, run_point, search_curve
from svdcompress.report._write import render, render_comparison, write

__all__ = [
    "FORMAT",
    "Curve",
    "MeasuredWith",
    "Mixture",
    "Results",
    "Row",
    "SectionWarning",
    "altered",
    "digest",
    "first_filters",
    "load",
    "log_alpha_histograms",
    "plain",
    "plot_tradeoff",
    "render",
    "render_comparison",
    "rows",
    "run_point",
    "search_curve",
    "stamped",
    "table",
    "write",
    "write_json",
    "write_text",
]

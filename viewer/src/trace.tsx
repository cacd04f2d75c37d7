// The trace of a forward pass: each step with its equation, shape, first values and the property that was checked.

import { data, type Step } from "./data";
import { trace } from "./texts";

export function Trace() {
  const { title, stages } = data.trace!;
  return (
    <section aria-labelledby="trace-title">
      <h2 id="trace-title">{title || trace.title}</h2>
      <p class="hint">{trace.hint} {trace.oneLayer}</p>
      {stages.map((stage, n) => (
        <div class="stage" key={n}>
          <h3>{stage.name}</h3>
          {stage.steps.map((step, at) => <TraceStep key={at} {...step} />)}
        </div>
      ))}
    </section>
  );
}

function TraceStep({ step, equation, code, dtype, invariant, why, mistake, note, axes, corner, held }: Step) {
  const mark = { true: "✓ ", false: "✗ ", null: "" }[String(held)];
  return (
    <article class="step">
      <div>
        <h4>{step}</h4>
        <p class="equation">{equation}</p>
        {code && <pre><code>{code}</code></pre>}
      </div>
      <div>
        <p class="shape" title={axes.map(([letter, size]) => trace.size(letter, size)).join(", ")}>
          {axes.map(([letter, size]) => <span key={letter}><i>{letter}</i> {size}</span>)} <small>{dtype}</small>
        </p>
        {corner && (
          <table class="corner"><tbody>
            {corner.map((line, row) => <tr key={row}>{line.map((value, column) => <td key={column}>{value}</td>)}</tr>)}
          </tbody></table>
        )}
      </div>
      <div>
        {invariant && <p class={held === false ? "broken" : "held"}>{mark}{invariant}</p>}
        <p>{why}</p>
        {mistake && <p class="mistake"><b>{trace.mistake}</b> {mistake}</p>}
        {note && (note.startsWith(trace.unusual)
          ? <p class="note">! {note}</p>
          : <p class="mistake"><b>{trace.here}</b> {note}</p>)}
      </div>
    </article>
  );
}

// The trace of a forward pass: each step with its equation, shape, first values and what was checked.

import { data, type Step } from "./data";

export function Trace() {
  const { title, stages } = data.trace!;
  return (
    <section aria-labelledby="trace-title">
      <h2 id="trace-title">{title || "Step by step"}</h2>
      <p class="hint">One forward pass of multi-head attention. The values are the first ones of the first batch entry and head.</p>
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
        <p class="shape" title={axes.map(([letter, size]) => `${letter} = ${size}`).join(", ")}>
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
        {mistake && <p class="mistake"><b>Common mistake.</b> {mistake}</p>}
        {note && <p class="mistake"><b>Here.</b> {note}</p>}
      </div>
    </article>
  );
}

// Compare, for encoders: similarities of texts as a matrix, a list in order of relevance, and labels.

import { call } from "./api.js";
import { announce, button, el, errorBox, field, number, percent, seconds } from "./dom.js";

const EXAMPLE_TEXTS = ["How do I bake bread?", "A recipe for a loaf of bread", "The train leaves at noon", "When does the train depart?"];

const lines = (box) => box.value.split("\n").map((line) => line.trim()).filter(Boolean);

/** Run what a form asks for, and show its result or the error under it. */
function tool(title, about, fields, action, work) {
  const result = el("div", { class: "result" });
  const run = async (event) => {
    event.preventDefault();
    go.disabled = true;
    const began = performance.now();
    try {
      const { shown, tokens } = await work();
      const took = (performance.now() - began) / 1000;
      const figures = [tokens ? `${number(tokens)} tokens` : null, seconds(took)].filter(Boolean).join(", ");
      result.replaceChildren(shown, el("p", { class: "muted" }, figures));
      announce(`${title}: done in ${seconds(took)}.`);
    } catch (error) {
      result.replaceChildren(errorBox(error));
    }
    go.disabled = false;
  };
  const go = el("button", { type: "submit", class: "primary" }, action);
  return el("section", {}, el("h2", {}, title), el("p", { class: "muted" }, about), el("form", { onsubmit: run }, fields, go), result);
}

export class ComparePage {
  constructor(info) {
    this.model = info.model.name;
    const type = Object.keys(info.model_type ?? {})[0];
    const tools = type === "embedding" || !type ? [this.similarities(), this.rerank()] : type === "reranker" ? [this.rerank()] : [this.classify()];
    this.element = el("div", { class: "page" }, el("h1", {}, "Compare"), tools);
  }

  async post(path, body) {
    return (await call(path, { body })).json();
  }

  similarities() {
    const first = el("textarea", { rows: "5", value: EXAMPLE_TEXTS.join("\n") });
    const second = el("textarea", { rows: "5", placeholder: "the same texts" });
    const fields = el("div", { class: "two" }, field("Texts, one a line", first), field("Against, one a line", second));
    return tool("Similarities", "The cosine of the vectors of each pair of texts.", fields, "Compare", async () => {
      const rows = lines(first);
      const columns = lines(second);
      const others = columns.length ? columns : rows;
      const texts = [...new Set([...rows, ...others])];
      if (!texts.length) throw new Error("Write at least one text.");
      const { data, usage } = await this.post("v1/embeddings", { model: this.model, input: texts });
      const vectors = new Map(texts.map((text, index) => [text, unit(data[index].embedding)]));
      const cosines = rows.map((row) => others.map((other) => dot(vectors.get(row), vectors.get(other))));
      return { shown: matrix(rows, others, cosines), tokens: usage?.total_tokens };
    });
  }

  rerank() {
    const query = el("input", { value: "When does the train leave?" });
    const documents = el("textarea", { rows: "5", value: EXAMPLE_TEXTS.join("\n") });
    const fields = [field("Query", query), field("Documents, one a line", documents)];
    return tool("Rerank", "Documents in order of their relevance for a query.", fields, "Rank", async () => {
      const body = { model: this.model, query: query.value, documents: lines(documents), return_documents: true };
      const { results, usage } = await this.post("v1/rerank", body);
      const items = results.map(({ document, relevance_score: score }) =>
        el("li", {}, document?.text ?? document, " ", el("span", { class: "muted number" }, number(score)), bar(score)),
      );
      return { shown: el("ol", { class: "ranked" }, items), tokens: usage?.total_tokens };
    });
  }

  classify() {
    const texts = el("textarea", { rows: "4", value: EXAMPLE_TEXTS.slice(0, 2).join("\n") });
    return tool("Classify", "The probability of each label.", field("Texts, one a line", texts), "Classify", async () => {
      const input = lines(texts);
      const { data, usage } = await this.post("v1/classify", { model: this.model, input });
      const items = data.map(({ predictions }, index) =>
        el(
          "li",
          {},
          input[index],
          el("div", { class: "bars" }, predictions.slice(0, 5).flatMap(({ label, score }) => [el("span", {}, label), bar(score, label), el("span", { class: "number" }, percent(score))])),
        ),
      );
      return { shown: el("ol", { class: "ranked" }, items), tokens: usage?.total_tokens };
    });
  }
}

const bar = (score, label = "score") => el("meter", { min: "0", max: "1", value: Math.min(1, Math.max(0, score)), "aria-label": label });
const dot = (one, two) => one.reduce((sum, value, index) => sum + value * two[index], 0);
const unit = (vector) => {
  const length = Math.sqrt(dot(vector, vector)) || 1;
  return vector.map((value) => value / length);
};

/** A table of cosines, shaded; the shade is behind text that stays legible. */
function matrix(rows, columns, cosines) {
  const head = el("tr", {}, el("td"), columns.map((text) => el("th", { scope: "col", title: text }, text)));
  const body = rows.map((text, index) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", title: text }, text),
      cosines[index].map((cosine) => {
        const cell = el("td", {}, cosine.toFixed(2));
        cell.style.backgroundColor = `color-mix(in srgb, var(--accent) ${Math.round(Math.max(0, cosine) * 35)}%, var(--paper))`;
        return cell;
      }),
    ),
  );
  const made = el("table", { class: "matrix" }, el("caption", {}, "Cosines of the texts' vectors"), el("thead", {}, head), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Similarities" }, made);
}

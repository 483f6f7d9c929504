// The text that Prometheus scrapes, as values by name and labels.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return a reader of the text: `value` of one series, `series` of all of a name. */
export function parseMetrics(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const match = LINE.exec(line);
    if (!match || match[1].endsWith("_bucket")) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value;
    if (!families.has(match[1])) families.set(match[1], []);
    families.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  const series = (name) => families.get(`armature_${name}`) ?? families.get(name) ?? [];
  const fits = (labels, wanted) => Object.entries(wanted).every(([name, value]) => labels[name] === value);
  return {
    series,
    /** Return the sum of the series with these labels, or null if there is none. */
    value(name, wanted = {}) {
      const found = series(name).filter(({ labels }) => fits(labels, wanted));
      return found.length ? found.reduce((sum, { value }) => sum + value, 0) : null;
    },
  };
}

// What a classic dashboard is, in the types that Grafana publishes; a literal of another shape does not compile.
import type * as grafana from "@grafana/schema";
import type * as timeseries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";

// JSON has no enumerations: a member stands for itself as text or number. What is left out, Grafana fills in.
type Json<T> = T extends string ? `${T}` : T extends readonly (infer E)[] ? Json<E>[] : T extends object ? { [K in keyof T]?: Json<T[K]> } : T;
type Exactly<T, Keys extends keyof T> = Json<T> & { [K in Keys]-?: unknown };

type DataSource = { type: "prometheus"; uid: "${datasource}" };
type Target = { refId: string; legendFormat: string; expr: string; format?: "heatmap" | "table"; instant?: true; range?: false };
type Fields<Custom> = Omit<Json<grafana.FieldConfig>, "custom"> & { unit: string; custom?: Json<Custom> };
type Override = { matcher: { id: "byName"; options: string }; properties: { id: string; value: unknown }[] };
type Transformation = { id: "merge" | "organize"; options: object };

interface Shown<Type extends string, Options, Custom> {
  id: number;
  type: Type;
  title: string;
  description: string;
  gridPos: { h: number; w: number; x: number; y: number };
  datasource: DataSource;
  fieldConfig: { defaults: Fields<Custom>; overrides: Override[] };
  options: Json<Options>;
  targets: Target[];
  maxDataPoints?: number;
  transformations?: Transformation[];
}

type Row = { id: number; type: "row"; title: string; gridPos: { h: 1; w: 24; x: 0; y: number }; collapsed: boolean; panels: [] };
type Panel =
  | Row
  | Shown<"timeseries", timeseries.Options, timeseries.FieldConfig>
  | Shown<"stat", stat.Options, never>
  | Shown<"table", table.Options, table.FieldConfig>
  | Shown<"heatmap", heatmap.Options, heatmap.FieldConfig>;

type Annotation = Json<grafana.AnnotationQuery> & { datasource: DataSource; expr: string; step: string; titleFormat: string; textFormat: string };
type Variable = Omit<Json<grafana.VariableModel>, "query"> & { name: string; query: string | { refId: string; qryType: 1; query: string } };

export type Dashboard = Omit<Json<grafana.Dashboard>, "id" | "panels" | "annotations" | "templating"> & {
  uid: string;
  schemaVersion: 42;
  annotations: { list: Annotation[] };
  templating: { list: Variable[] };
  panels: Panel[];
};

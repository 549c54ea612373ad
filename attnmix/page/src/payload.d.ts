// Written by attnmix/page/shape.py.
export type Payload = {
  pointsPerSecond: number;
  labels: {
    methods: Record<string, string>;
    checkpoints: Record<string, string>;
    matrices: Record<string, string>;
    importance: Record<string, string>;
    steps: Record<string, string>;
    stepMeasures: Record<string, string>;
    controls: Record<string, string>;
    derivatives: Record<string, string>;
    geometry: Record<string, string>;
    points: Record<string, string>;
    probes: Record<string, string>;
    layers: string[];
  };
  captured: string;
  onePlane: string[];
  ownBasis: string[];
  stream: string[];
  method: string;
  layer: number;
  importance: Record<string, { limit: number; values: string }>;
  reviews: { names: string[]; total: number; values: Record<string, Record<string, string>> };
  answer: {
    headline: string;
    sentences: string[];
    chart: {
      title: string;
      series: { name: string; values: (number | null)[]; low: (number | null)[]; high: (number | null)[] }[];
      unit: string;
    };
  };
  opens: { document: number; token: number };
  curves: {
    checkpoint: string;
    layer: number;
    method: string;
    mean: number;
    ci_low: number | null;
    ci_high: number | null;
  }[];
  differences: {
    checkpoint: string;
    layer: number;
    method: string;
    mean: number;
    ci_low: number | null;
    ci_high: number | null;
  }[];
  controls: {
    checkpoint: string;
    layer: number;
    method: string;
    mean: number;
    ci_low: number | null;
    ci_high: number | null;
    control: string;
  }[];
  sources: {
    checkpoint: string;
    layer: number;
    method: string;
    mean: number;
    ci_low: number | null;
    ci_high: number | null;
    source: string;
  }[];
  derivatives: {
    checkpoint: string;
    layer: number;
    method: string;
    mean: number;
    ci_low: number | null;
    ci_high: number | null;
  }[];
  removal: { method: string; share: string; drop: number; ci_low: number | null; ci_high: number | null }[];
  probes: {
    checkpoint: string;
    layer: number;
    method: string;
    mean: number;
    ci_low: number | null;
    ci_high: number | null;
  }[];
  steps: {
    checkpoint: string;
    layer: number;
    step: string;
    measure: string;
    mean: number;
    ci_low: number | null;
    ci_high: number | null;
  }[];
  geometry: {
    checkpoint: string;
    layer: number;
    point: string;
    measure: string;
    mean: number;
    ci_low: number | null;
    ci_high: number | null;
  }[];
  neighboursKept: Record<string, (number | null)[][]>;
  documents: { name: string; start: number; length: number; begins: string; direction: string; note: string }[];
  encoder: number | null;
  readings: { names: string[]; words: string[]; apart: number[]; classes: number[] }[];
  classNames: string[];
  ratios: { methods: string[]; layers: number; values: Record<string, Record<string, string>> };
  contributions: Record<
    string,
    Record<string, Record<string, { keep: number; sources: string; shares: string; own: string }>>
  >;
  sourcesKept: number;
  matrices: string[];
  attention: {
    number: number;
    width: number;
    documents: Record<
      string,
      Record<
        string,
        {
          scores: number[][];
          reach: string;
          source_norms: string;
          given_norms: string;
          key_heads: number;
          bits: number;
          query: string;
          key: string;
          sums?: string;
          vectors?: Record<string, string>;
          query_scales?: string;
          key_scales?: string;
          ranks?: number[];
          largest_error?: number;
          mean_error?: number;
        }
      >
    >;
  };
  tokenSteps: Record<string, string>;
  sites: { layer: number; point: string; label: string; reading: number }[];
  maps: Record<string, { ranges: number[][][]; x: string; y: string; absent: number[] }>;
  nearest: { number: number; tokens: string };
};

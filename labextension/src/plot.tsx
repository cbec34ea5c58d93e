import * as React from 'react';

import type { IThisSession } from './tokens';

const WIDTH = 240;
const HEIGHT = 48;
/** More than this many periods without a point is a gap, and no line is drawn over it. */
const GAP = 2.5;

export interface IPoint {
  at_s: number;
  value: number | null;
}

/** Return the pieces of a line through the points, in the picture's coordinates; unknown values leave gaps. */
export function pieces(
  points: readonly IPoint[],
  most: number,
  everyS: number
): [number, number][][] {
  const first = points[0]?.at_s ?? 0;
  const last = points[points.length - 1]?.at_s ?? 0;
  const span = Math.max(1, last - first);
  const found: [number, number][][] = [];
  let before: number | null = null;
  for (const { at_s, value } of points) {
    if (value === null) {
      before = null;
      continue;
    }
    const x = (WIDTH * (at_s - first)) / span;
    const y = HEIGHT - (HEIGHT * Math.min(most, Math.max(0, value))) / most;
    const piece = found[found.length - 1];
    if (before === null || piece === undefined || at_s - before > GAP * everyS) {
      found.push([[x, y]]);
    } else {
      piece.push([x, y]);
    }
    before = at_s;
  }
  return found;
}

/** Return the largest value that is known, or null. */
export function peak(points: readonly { value: number | null }[]): number | null {
  const known = points.flatMap(p => (p.value === null ? [] : [p.value]));
  return known.length === 0 ? null : Math.max(...known);
}

/**
 * Return the measured points and, after them, what is held now as it is seen from inside: the machine is measured some
 * seconds later, and a plot that ends before would say less than the number above it.
 */
export function withNow<P extends { at_s: number; memory_used_mib: number | null }>(
  measured: readonly P[],
  session: Pick<IThisSession, 'gpu_memory_used_mib'>,
  everyS: number
): (P | { at_s: number; memory_used_mib: number; sm_percent: null })[] {
  const used = session.gpu_memory_used_mib;
  const last = measured[measured.length - 1];
  if (used === null || last === undefined) {
    return [...measured];
  }
  return [
    ...measured,
    // By the machine's clock: the browser's may be another.
    { at_s: last.at_s + everyS, memory_used_mib: used, sm_percent: null }
  ];
}

/** A small plot of the last minutes; `mark` is drawn as a dashed line, such as what one is entitled to. */
export function Plot(props: {
  points: readonly IPoint[];
  most: number;
  everyS: number;
  mark?: number | null;
  /** What the plot shows, in words: for those who do not see it. */
  label: string;
  caption: string;
}): JSX.Element {
  const { points, most, everyS, mark, label, caption } = props;
  const found = pieces(points, most, everyS);
  const text = (line: [number, number][]) =>
    line.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(' ');
  const markY = mark ? HEIGHT - (HEIGHT * Math.min(most, mark)) / most : null;
  return (
    <figure className="jp-fgpu-Plot">
      <svg
        role="img"
        aria-label={label}
        viewBox={`0 -1 ${WIDTH} ${HEIGHT + 2}`}
        preserveAspectRatio="none"
      >
        {found.map((line, index) => (
          <polygon
            key={`a${index}`}
            points={`${line[0]![0]},${HEIGHT} ${text(line)} ${line[line.length - 1]![0]},${HEIGHT}`}
          />
        ))}
        {found.map((line, index) => (
          <polyline
            key={`l${index}`}
            // A single point would not be seen.
            points={text(line.length > 1 ? line : [line[0]!, [line[0]![0] + 1, line[0]![1]]])}
            vectorEffect="non-scaling-stroke"
          />
        ))}
        {markY !== null && (
          <line
            x1={0}
            x2={WIDTH}
            y1={markY}
            y2={markY}
            vectorEffect="non-scaling-stroke"
          />
        )}
      </svg>
      <figcaption className="jp-fgpu-Minor">{caption}</figcaption>
    </figure>
  );
}

import * as React from 'react';

import { errorText } from './format';
import type { IContext } from './parts';
import type { IProof, IProofCheck } from './tokens';

const LOOK_AGAIN_MS = 1000;

/** Has the server run fgpu-verify, and shows what it found: which limits held. */
export function Proof(props: { context: IContext }): JSX.Element {
  const { trans, actions } = props.context;
  const [proof, setProof] = React.useState<IProof | null>(null);
  const [problem, setProblem] = React.useState<string | null>(null);
  const running = proof?.state === 'running';

  const ask = async (begin: boolean) => {
    try {
      setProof(await actions.proof(begin));
      setProblem(null);
    } catch (error) {
      setProblem(errorText(error));
      setProof(null);
    }
  };
  React.useEffect(() => {
    const timer = running
      ? setTimeout(() => void ask(false), LOOK_AGAIN_MS)
      : undefined;
    return () => clearTimeout(timer);
  }, [proof]);

  const said = problem ?? proof?.problem ?? null;
  return (
    <div className="jp-fgpu-Proof">
      <button
        type="button"
        // Not disabled while it runs: the keyboard would lose its place.
        aria-disabled={running}
        title={trans.__('Try to get around the limits, and show what held')}
        onClick={() => running || void ask(true)}
      >
        {running ? trans.__('Proving…') : trans.__('Prove my slice')}
      </button>
      <div role="status">
        {running && (
          <p className="jp-fgpu-Minor">
            {trans.__(
              'Testing whether the limits hold. This takes up to three minutes, and keeps your GPU busy for some seconds.'
            )}
          </p>
        )}
        {!running && said !== null && (
          <p className="jp-fgpu-Problem">{trans.__('Not proved: %1', said)}</p>
        )}
        {proof?.state === 'held' && (
          <p>
            {proof.checks.some(check => check.state === 'bypassed')
              ? trans.__(
                  'Your limits hold, with known gaps. %1',
                  heldText(proof, trans)
                )
              : trans.__('Your limits hold. %1', heldText(proof, trans))}
          </p>
        )}
        {proof?.state === 'failed' && (
          <p className="jp-fgpu-Problem">
            {trans.__(
              'Not every limit held. Tell your administrator. %1',
              heldText(proof, trans)
            )}
          </p>
        )}
      </div>
      {!running && proof !== null && proof.checks.length > 0 && (
        <ProofTable checks={proof.checks} context={props.context} />
      )}
    </div>
  );
}

/** Return how many of the checks held. */
function heldText(proof: IProof, trans: IContext['trans']): string {
  const held = proof.checks.filter(check => check.state === 'held').length;
  return trans.__('%1 of %2 checks held.', held, proof.checks.length);
}

function ProofTable({ checks, context }: {
  checks: IProofCheck[];
  context: IContext;
}): JSX.Element {
  const { trans } = context;
  const words: Record<IProofCheck['state'], string> = {
    held: trans.__('held'),
    failed: trans.__('failed'),
    bypassed: trans.__('known gap'),
    'not tried': trans.__('not tried')
  };
  return (
    <table className="jp-fgpu-ProofTable">
      <caption>{trans.__('What was tried')}</caption>
      <thead>
        <tr>
          <th scope="col">{trans.__('Check')}</th>
          <th scope="col">{trans.__('Result')}</th>
        </tr>
      </thead>
      <tbody>
        {checks.map(check => (
          <tr key={check.name}>
            <td title={check.text}>
              {check.what}
              {check.state !== 'held' && (
                <div className="jp-fgpu-Minor">{check.text}</div>
              )}
            </td>
            <td className={check.state === 'failed' ? 'jp-fgpu-mod-failed' : ''}>
              {words[check.state]}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
